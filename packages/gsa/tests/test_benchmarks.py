"""The scripts of `benchmarks/`, rehearsed on a CPU: what is written, kept and refused."""

import json
import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.papers import load_bench, load_experiments, load_published
from mezzo_gsa.bench import fla

GSA = Path(__file__).parents[1]
PUBLISHED = load_published(GSA / "src/mezzo_gsa/published.toml")


def script(name):
    return SimpleNamespace(**runpy.run_path(str(GSA / f"benchmarks/{name}.py")))


speed, ablation, mqar, ops = map(script, ("model_speed", "ablation", "mqar", "ops_and_layers"))
TRAINED = ("Xfmr++", "GSA", "GSA w/o recomp.", "32 slots")


def content(folder, name):
    return json.loads((folder / name).read_text())


def run_speed(folder, *words, commit="c1"):
    return speed.main(["--dry-run", "--out", str(folder), "--commit", commit, *words])


def run_ablation(folder, *words, steps=2, commit="c1"):
    common = ["--dry-run", "--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    return ablation.main([*common, "--steps", str(steps), "--commit", commit, *words])


@pytest.fixture(scope="module")
def speeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speeds") / "cpu"
    assert run_speed(folder, "--models", *TRAINED) == 0
    return folder


@pytest.fixture(scope="module")
def ablated(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ablated")
    rows = ("gsa", "abc", "gsa_constant_decay", "attention")
    assert run_ablation(folder, "--rows", *rows) == 0
    return folder


def test_speeds_are_experiments_on_the_papers_claims(speeds):
    found = {each.source: each for each in load_experiments(speeds.parent)}
    assert set(found) == {"speed_training.json", "speed_slots.json", "speed_generation.json"}
    for experiment in found.values():
        assert set(experiment.ids) <= set(PUBLISHED.ids)
        assert not experiment.same_setting
        assert experiment.measurement.commit == "c1"
        assert "rehearsal" in experiment.measurement.setting
        for row in experiment.measurement.rows:
            assert len(row.runs) == speed.DRY.passes
    models = {row.model for row in found["speed_training.json"].measurement.rows}
    assert models == {"Xfmr++", "GSA", "GSA w/o recomp."}
    assert (speeds / "speed_fig4.png").stat().st_size > 0


def test_the_same_steps_speak_of_64_slots(speeds):
    training = {
        (c["model"], c["column"]): c["values"]
        for c in content(speeds, "speed_training.json")["cells"]
    }
    slots = {c["model"]: c["values"] for c in content(speeds, "speed_slots.json")["cells"]}
    assert set(slots) == {"32 slots", "64 slots"}
    assert slots["64 slots"] == training["GSA", "32"]


def test_the_slots_order_reads_the_claims_own_names(speeds):
    claim = PUBLISHED.claim("gsa.claim.slot_throughput")
    assert set(speed.result_files(speed.FULL, True)["slots"].models) == set(claim.ordering)


def test_latency_grows_with_the_new_tokens(speeds):
    for row in content(speeds, "speed_generation.json")["rows"]:
        assert 0 < row["values"][0] < row["values"][1]


def test_a_second_run_measures_nothing_and_another_commit_only_what_it_is_asked(speeds, tmp_path):
    for path in speeds.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = {path.name: path.read_text() for path in tmp_path.glob("*.json")}
    assert run_speed(tmp_path, "--models", *TRAINED) == 0
    assert {path.name: path.read_text() for path in tmp_path.glob("*.json")} == before
    words = ["--models", "GSA", "--only", "training", "--lengths", "64"]
    assert run_speed(tmp_path, *words, commit="c2") == 0
    cells = content(tmp_path, "speed_training.json")["cells"]
    assert {(c["model"], c["column"]) for c in cells if c["commit"] == "c2"} == {("GSA", "64")}


@pytest.mark.parametrize("name", speed.ARCHITECTURES)
def test_models_have_the_papers_size(name):
    with torch.device("meta"):
        model = speed.model_config(name, speed.FULL).build()
    assert 1.25e9 < model.num_parameters() < 1.45e9
    assert len(model.stack.blocks) == 24


def test_only_one_model_keeps_its_states():
    kept = {
        name
        for name in speed.ARCHITECTURES
        if getattr(speed.model_config(name, speed.FULL).mixers[0], "keep_states", False)
    }
    assert kept == {"GSA w/o recomp."}


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--models", "GSB"], "--models.*'GSB'.*GSA"),
        (["--lengths", "33"], "--lengths.*33"),
        (["--only", "trainin"], "--only.*training"),
        (["--models", speed.FLA], "flash-linear-attention, which is not installed"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(
    tmp_path, capsys, monkeypatch, words, named
):
    monkeypatch.setattr(fla, "is_installed", lambda: False)
    assert run_speed(tmp_path / "out", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.search(named, line)
    assert not (tmp_path / "out").exists()


def test_an_ablation_is_an_experiment_on_table_2(ablated):
    (experiment,) = load_experiments(ablated / "results")
    assert set(experiment.ids) <= set(PUBLISHED.ids)
    table = PUBLISHED.table("gsa.table2")
    assert experiment.measurement.columns == table.columns
    printed = {(row.group, row.model) for row in table.rows}
    ours = {(row.group, row.model) for row in experiment.measurement.rows}
    assert ours - printed == {("attention", "Xfmr++")}
    assert len(ours) == 4
    assert (ablated / "results/cpu/ablation.png").stat().st_size > 0


def test_every_row_of_table_2_can_be_trained():
    assert {row.model for row in PUBLISHED.table("gsa.table2").rows} <= set(ablation.NAMES.values())


def test_rows_differ_in_their_mixers_alone():
    arguments = ablation.parse(["--out", "out"])
    configs = {name: ablation.configure(name, 0, arguments) for name in ablation.NAMES}
    assert len({config.model.mixers for config in configs.values()}) == len(configs)
    for config in configs.values():
        assert config.model.mlp == configs["gsa"].model.mlp
        assert (config.optim, config.seq_len) == (configs["gsa"].optim, configs["gsa"].seq_len)
        with torch.device("meta"):
            assert 30e6 < config.model.build().num_parameters() < 40e6


def test_orders_are_compared_where_all_rows_were_trained(ablated):
    orders = content(ablated / "results/cpu", "ablation.json")["orders"]
    assert orders[0].startswith("gating mechanism: the order is not settled")
    first = "  GSA w/ 64 slots before w/ data-independent decay: not settled"
    assert orders[1].startswith(first)
    assert orders[-2:] == [
        "non-linearity: not all of its rows were trained",
        "slot size: not all of its rows were trained",
    ]


def test_an_order_that_three_seeds_agree_on_is_settled():
    rows = ("GSA w/ 64 slots", "w/ 32 slots", "w/ 128 slots")
    runs = {
        (name, seed): {"perplexity": value + 0.01 * seed}
        for name, value in zip(rows, (2.0, 3.0, 1.0), strict=True)
        for seed in range(3)
    }
    assert "slot size: the order holds (w/ 128 slots 1.01, GSA w/ 64 slots" in "\n".join(
        ablation.orders(runs)
    )
    del runs["w/ 32 slots", 2]
    assert "slot size: the order holds (w/ 128 slots 1.005," in "\n".join(ablation.orders(runs))


def test_a_second_ablation_replaces_its_rows_and_keeps_the_others(ablated, tmp_path):
    folder = tmp_path / "results/cpu"
    folder.mkdir(parents=True)
    (folder / "ablation.json").write_text((ablated / "results/cpu/ablation.json").read_text())
    assert run_ablation(tmp_path, "--rows", "abc", commit="c2") == 0
    runs = content(folder, "ablation.json")["runs"]
    assert {run["model"]: run["commit"] for run in runs} == {
        "GSA w/ 64 slots": "c1",
        "w/o decay (i.e., ABC)": "c2",
        "w/ data-independent decay": "c1",
        "Xfmr++": "c1",
    }


def test_runs_of_another_setting_are_not_mixed_in(ablated, tmp_path, capsys):
    folder = tmp_path / "results/cpu"
    folder.mkdir(parents=True)
    (folder / "ablation.json").write_text((ablated / "results/cpu/ablation.json").read_text())
    assert run_ablation(tmp_path, "--rows", "abc", steps=3) == 2
    assert "another setting" in capsys.readouterr().err
    assert run_ablation(tmp_path, "--rows", "abd") == 2
    assert "did you mean abc" in capsys.readouterr().err


def test_a_sweep_of_mqar_says_what_was_cut(tmp_path, capsys):
    folder = tmp_path / "results/cpu"
    words = ["--dry-run", "--out", str(folder), "--models", "gsa", "--lr", "1e-2"]
    assert mqar.main([*words, "--commit", "c1"]) == 0
    (experiment,) = load_experiments(tmp_path / "results")
    assert experiment.ids == ("gsa.claim.mqar",)
    assert experiment.measurement.commit == "c1"
    assert "T 32, 4 pairs, vocabulary 64" in experiment.measurement.setting
    assert not experiment.same_setting
    assert re.search(r"gsa C=16: 0\.\d{4} with lr 0\.01", capsys.readouterr().out)
    config = mqar.configure(mqar.parse(["--out", "out"]))
    assert (config.task.seq_len, config.task.num_pairs) == (512, 64)
    assert (config.models, config.widths) == (mqar.WHOLE.models, mqar.WHOLE.widths)


def test_sweeps_of_several_gpus_are_joined(tmp_path, capsys):
    parts = [str(tmp_path / name) for name in ("gla", "retnet")]
    for part in parts:
        words = ["--dry-run", "--models", Path(part).name, "--lr", "1e-2", "--out", part]
        assert mqar.main(words) == 0
    whole = ["--dry-run", "--out", str(tmp_path / "whole"), "--join"]
    assert mqar.main([*whole, *parts, parts[0]]) == 0
    runs = [run for part in parts for run in content(Path(part), "mqar.json")["runs"]]
    assert content(tmp_path / "whole", "mqar.json")["runs"] == runs
    assert mqar.main([*whole, str(tmp_path / "none")]) == 2
    assert "none/mqar.json holds no runs" in capsys.readouterr().err


def test_ops_and_layers_are_measured_part_by_part(tmp_path, capsys):
    out = tmp_path / "cpu/bench.jsonl"
    assert ops.main(["--smoke", "--out", str(out), "--only", "attention", "--commit", "c1"]) == 0
    assert {row["name"].split()[0] for row in load_bench(tmp_path)} == {"attention"}
    assert ops.main(["--smoke", "--only", "attenton"]) == 2
    assert "attention" in capsys.readouterr().err


@pytest.mark.parametrize("benchmark", [speed, ablation, mqar])
def test_the_papers_sizes_need_a_gpu(benchmark, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "CUDA GPU" in line
    assert not (tmp_path / "out").exists()
