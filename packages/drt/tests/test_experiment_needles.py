"""The experiment on needles, rehearsed on a CPU: what is written, and what a full run is."""

import runpy
import shutil
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from mezzo_core.reproduction import Cell, Options
from mezzo_core.reproduction.measurement import How, read_result
from mezzo_drt.reproduction.claims import REPRODUCTION

SCRIPT = Path(__file__).parents[1] / "experiments/needles.py"
needles = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
DRT1, DRT2, LANDMARK = needles.DRT1, needles.DRT2, needles.LANDMARK
PASSKEY, TWO_HOP = needles.PASSKEY, needles.TWO_HOP
TABLES = {PASSKEY: "drt.table2.single_niah", TWO_HOP: "drt.table2.two_hop_niah"}


def dry_run(folder, *words):
    folders = ["--out", str(folder / "results/cpu"), "--runs", str(folder / "runs")]
    command = ["needles.py", "--dry-run", "--seeds", "0", *folders, *words]
    with patch("sys.argv", command):
        return needles.run_script(
            needles.measure, "Find.", needles.MODELS, trains=True, parallel=True
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rehearsal")
    assert dry_run(folder, "--models", LANDMARK, DRT1) == 0
    return folder


def test_each_length_of_each_model_is_measured(folder):
    ours = read_result(folder / "results/cpu/two_hop.json")
    assert [(e.model, e.column) for e in ours.entries] == [
        (model, column) for model in (LANDMARK, DRT1) for column in ("1K", "4K")
    ]
    assert (ours.seeds, ours.how) == ([0], How.SCALED_DOWN)
    for entry in ours.entries:
        assert entry.details["samples"] == {"1K": 2, "4K": 1}[entry.column]
        rows, samples = entry.details["rows"], entry.details["samples"]
        assert rows == samples
        offloaded = rows * 2 * needles.num_tokens(entry.column) * 32 * 4 / 1e9
        assert entry.details["host_gb"] == pytest.approx(
            offloaded * (entry.model == DRT1), rel=1e-4
        )
        assert ("steps" in entry.details) == (entry.column == "1K")


def test_the_last_stage_s_model_is_enough_to_measure_again(folder, monkeypatch):
    """Of a run on a machine that is gone, it may be all that was kept."""
    runs = folder / "runs"
    for stage in runs.glob(f"{PASSKEY}_*"):
        shutil.rmtree(stage / "checkpoints")
    for first in runs.glob(f"{PASSKEY}_*_0"):
        shutil.rmtree(first / "model")
    monkeypatch.setitem(needles.train_and_ask.__globals__, "measure_run", None)  # trains nothing
    options = Options(folder, (), torch.device("cpu"), dry_run=True, runs=runs)
    cells = (Cell(DRT1, "4K", seed=0),)
    (found,) = needles.train_and_ask(PASSKEY, needles.DRY, options, cells, folder, options.device)
    assert found[0].details["samples"] == 1
    hops = needles.runs_of(TWO_HOP, DRT1, 0, needles.DRY, options)
    last = [*hops][-1]
    shutil.rmtree(last / "model")
    assert [home for home, _ in needles.not_trained(hops)] == [last], "what leads there stays"


def test_a_full_run_covers_the_printed_lengths():
    for name, table in TABLES.items():
        printed = REPRODUCTION.published.by_id[table]
        columns = [column for column in printed.columns if column != "Retrieval"]
        assert set(columns) <= set(needles.FULL.columns[name]) <= set(needles.FULL.samples)
        assert set(needles.MEASURED[name]) <= {row.model for row in printed.rows}


def test_stages_follow_one_another():
    options = Options(Path("out"), (), torch.device("cpu"), dry_run=False, data="texts")
    runs = needles.runs_of(needles.EIGHT_PATHS, DRT2, 1, needles.FULL, options)
    assert len(runs) == sum(map(len, needles.FULL.stages.values()))
    assert next(iter(runs.values())).init_from is None
    for (before, _), (_, after) in pairwise(runs.items()):
        assert after.init_from == str(before / "model")
    assert {config.data.text.source for config in runs.values()} == {"texts"}
    assert {config.data.chunk_size for config in runs.values()} == {64}
    landmark = [*needles.runs_of(PASSKEY, LANDMARK, 0, needles.FULL, options).values()]
    assert [config.seq_len for config in landmark] == [512, *[768] * 4]
    assert {config.batch_size for config in landmark} == {16}, "short rows, so more of them"
