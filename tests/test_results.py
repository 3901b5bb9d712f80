"""The tables in the documents say what the committed results say."""

import json
import math
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[1]
check_results = SimpleNamespace(**runpy.run_path(str(ROOT / "tools/check_results.py")))
READMES = [p for p in ROOT.glob("packages/*/README.md") if check_results.START in p.read_text()]


@pytest.mark.parametrize("readme", READMES, ids=lambda path: path.parent.name)
def test_tables_are_generated_from_the_results(readme):
    text = readme.read_text(encoding="utf-8")
    assert check_results.updated(text, readme.parent / "results") == text


def test_a_changed_result_would_be_noticed(tmp_path):
    (readme,) = (path for path in READMES if path.parent.name == "rat")
    text = readme.read_text(encoding="utf-8")
    for path in (readme.parent / "results").glob("*/*.json*"):
        copy = tmp_path / path.parent.name / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_text(path.read_text().replace("tokens of", "words of"))
    assert check_results.updated(text, tmp_path) != text


ORIGIN = {"gpu": None, "cpu": "x86_64, 2 threads", "setting": "a setting", "columns": ["PPL"]}


def written(tmp_path, name, text):
    path = tmp_path / "cpu" / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def test_seeds_of_a_training_are_one_line_with_their_spread(tmp_path):
    took = {"parameters": 1_000_000, "tokens_per_second": 1000, "peak_gb": None}
    runs = [{"model": m, "seed": s, **took} for m, s in (("a", 0), ("a", 1), ("b", 0))]
    values = (12.0, 13.0, 14.5)
    rows = [{"model": r["model"], "values": [v]} for r, v in zip(runs, values, strict=True)]
    path = written(tmp_path, "t.json", json.dumps({**ORIGIN, "runs": runs, "rows": rows}))
    table = check_results.experiment_table(path).splitlines()
    assert table[0] == "**CPU (x86_64, 2 threads)**, a setting (cpu/t.json):"
    assert table[2:] == [
        "| Model | Weights | PPL | tokens/s (fastest seed) | peak GB |",
        "|---|---|---|---|---|",
        "| a | 1.0M | 12.5 (2 seeds, spread 1) | 1,000 | - |",
        "| b | 1.0M | 14.5 | 1,000 | - |",
    ]


def test_models_made_of_another_show_the_perplexity_before_any_step(tmp_path):
    took = {"parameters": 1_000_000, "tokens_per_second": 1000, "peak_gb": None}
    starts = {"a": [[0, math.log(50.0)], [5, 2.0]], "b": [[5, 2.0]]}
    runs = [{"model": m, "seed": 0, "val": val, **took} for m, val in starts.items()]
    rows = [{"model": m, "values": [7.4]} for m in starts]
    path = written(tmp_path, "t.json", json.dumps({**ORIGIN, "runs": runs, "rows": rows}))
    assert check_results.experiment_table(path).splitlines()[2:] == [
        "| Model | Weights | PPL before | PPL | tokens/s | peak GB |",
        "|---|---|---|---|---|---|",
        "| a | 1.0M | 50.0 | 7.4 | 1,000 | - |",
        "| b | 1.0M | - | 7.4 | 1,000 | - |",
    ]


def test_an_experiment_without_speeds_is_its_values(tmp_path):
    content = {**ORIGIN, "runs": [{"model": "a"}], "rows": [{"model": "a", "values": [0.5]}]}
    path = written(tmp_path, "m.json", json.dumps(content))
    assert check_results.experiment_table(path).endswith("| Model | PPL |\n|---|---|\n| a | 0.5 |")


def test_layers_ops_and_decoding_have_tables_of_their_own(tmp_path):
    def row(name, T, ms, B=1, **sizes):
        machine = {"gpu": "a GPU", "impl": "triton", "ms": ms}
        return json.dumps({"name": name, "shape": {"B": B, "T": T, **sizes}, **machine})

    lines = [
        row("gsa layer forward", 64, 1.0, C=8, M=4),
        row("gsa layer train", 64, 2.0, C=8, M=4),
        row("gla layer forward", 64, 3.0, C=8),
        row("gsa op forward", 64, 0.5, M=4),
        row("gsa op forward", 64, 0.75, B=2, M=4),
        row("gsa layer decode", 1, 0.125, C=8, M=4),
        row("rat model train", 64, 9.0),
    ]
    layers, ops, decoding = check_results.bench_tables(
        written(tmp_path, "b.jsonl", "\n".join(lines))
    )
    assert "C 8, 64 tokens a batch" in layers
    assert "| gsa, M = 4 (triton) | 1.0 / 2.0 |\n| gla (triton) | 3.0 / - |" in layers
    assert "| Op | B = 1, T = 64 | B = 2, T = 64 |" in ops
    assert "| gsa, M = 4 (triton) | 0.50 / - | 0.75 / - |" in ops
    assert decoding.endswith("| gsa, M = 4 (triton) | 0.1250 |")
    assert "9.0" not in layers + ops + decoding


def test_every_result_says_where_it_comes_from():
    files = list(ROOT.glob("packages/*/results/*/*.json*"))
    assert files
    for path in files:
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        for line in lines:
            content = json.loads(line)
            assert content["commit"], path
            assert content["torch"], path
            assert content["date"], path
            assert content["gpu"] or content["cpu"], path
