"""Committed results are read as measurements, seeds in one order, and bad files are named."""

import json

import pytest
from mezzo_core.errors import UserError
from mezzo_core.papers import load_bench, load_experiments

EXPERIMENT = {
    "id": "t1",
    "same_setting": False,
    "columns": ["PPL"],
    "rows": [
        {"model": "x", "seed": 1, "values": [2.0]},
        {"model": "y", "seed": 0, "values": [5.0]},
        {"model": "x", "seed": 0, "values": [1.0]},
        {"model": "y", "seed": 1, "values": [6.0]},
    ],
    "setting": "small",
    "better": "lower",
    "gpu": "NVIDIA H200",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": "abc",
    "date": "2026-01-31",
}
BENCH = {"name": "rat layer train", "impl": "triton", "shape": {"T": 8}, "ms": 1.0}


def write(tmp_path, name, text):
    folder = tmp_path / "nvidia-h200"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")


def test_runs_of_a_model_are_gathered_in_the_order_of_their_seeds(tmp_path):
    write(tmp_path, "training.json", json.dumps(EXPERIMENT))
    (experiment,) = load_experiments(tmp_path)
    assert experiment.ids == ("t1",)
    assert experiment.measurement.samples("PPL") == {"x": (1.0, 2.0), "y": (5.0, 6.0)}
    assert experiment.measurement.seeds == (0, 1)
    x = next(row for row in experiment.measurement.rows if row.model == "x")
    assert (x.values, x.spread) == ((1.5,), (1.0,))


def test_models_with_other_seeds_are_compared_over_those_that_all_have(tmp_path):
    rows = [
        *EXPERIMENT["rows"],
        {"model": "z", "seed": 1, "values": [8.0]},
        {"model": "w", "seed": 2, "values": [9.0]},
    ]
    write(tmp_path, "training.json", json.dumps({**EXPERIMENT, "rows": rows}))
    (experiment,) = load_experiments(tmp_path)
    ours = experiment.measurement
    assert ours.paired("PPL", "", "xy") == {"x": (1.0, 2.0), "y": (5.0, 6.0)}
    assert ours.paired("PPL", "", "xyz?") == {"x": (2.0,), "y": (6.0,), "z": (8.0,)}
    assert ours.paired("PPL", "", "xw") == ours.paired("PPL", "", "?") == {}


@pytest.mark.parametrize("key", ["id", "rows", "gpu", "setting", "commit", "date"])
def test_an_experiment_without_what_it_depends_on_is_refused(tmp_path, key):
    write(tmp_path, "bad.json", json.dumps({k: v for k, v in EXPERIMENT.items() if k != key}))
    with pytest.raises(UserError, match=rf"bad\.json.*{key}"):
        load_experiments(tmp_path)


def test_a_seed_that_is_there_twice_is_refused(tmp_path):
    rows = [*EXPERIMENT["rows"], EXPERIMENT["rows"][0]]
    write(tmp_path, "training.json", json.dumps({**EXPERIMENT, "rows": rows}))
    with pytest.raises(UserError, match=r"training.json: .*x has two rows of seed 1"):
        load_experiments(tmp_path)


def test_a_bench_row_without_its_spread_is_named_by_line(tmp_path):
    good = {**BENCH, "ms_p20": 0.9, "ms_p80": 1.1, "gpu": "NVIDIA H200"}
    write(tmp_path, "layer.jsonl", json.dumps(good) + "\n")
    assert load_bench(tmp_path) == [good]
    write(tmp_path, "layer.jsonl", json.dumps(good) + "\n" + json.dumps(BENCH) + "\n")
    with pytest.raises(UserError, match=r"layer\.jsonl, line 2: no ms_p20, ms_p80, gpu"):
        load_bench(tmp_path)


def test_no_results_folder_means_no_results(tmp_path):
    assert load_experiments(tmp_path / "none") == []
    assert load_bench(tmp_path / "none") == []
