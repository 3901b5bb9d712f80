"""The examples fit on a screen and run as they are; what they train learns."""

import json
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
ACROSS = [
    path for path in EXAMPLES if path.stem in ("drt_with_rat", "hybrid", "transformer_to_rat")
]
"""Layers of several packages in one model, trained by `train`."""


def losses(run: Path) -> list[float]:
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
@pytest.mark.parametrize("example", ACROSS, ids=lambda path: path.stem)
def test_an_example_runs_and_its_models_learn(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    runs = sorted(path.parent for path in tmp_path.glob("runs/**/log.jsonl"))
    assert runs
    for run in runs:
        assert losses(run)[-1] < 0.95 * losses(run)[0]
    if example.stem == "transformer_to_rat":  # what it keeps is worth many steps
        rat, transformer = map(losses, runs)
        assert rat[0] < (transformer[0] + transformer[-1]) / 2
    else:
        assert "It is a truth" in capsys.readouterr().out


@pytest.mark.parametrize("example", [e for e in EXAMPLES if e not in ACROSS], ids=lambda e: e.stem)
def test_an_example_runs_and_prints(example, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(example), run_name="__main__")
    printed = capsys.readouterr().out
    assert printed
    if example.stem == "laws_of_mamba":  # its cache forgets what was before a segment
        kept = {line.partition(": kept")[0] for line in printed.splitlines() if ": kept" in line}
        assert "causal" in kept
        assert not {"segments", "ragged", "packed"} & kept


def test_an_example_has_at_most_fifty_lines():
    assert len(ACROSS) == 3
    for example in EXAMPLES:
        assert len(example.read_text().splitlines()) <= 50
