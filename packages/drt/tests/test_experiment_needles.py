"""The experiment on needles, rehearsed on a CPU: what is written, and what a full run is."""

import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from mezzo_core.reproduction import Options
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
        (model, "1K") for model in (LANDMARK, DRT1)
    ]
    assert (ours.seeds, ours.how) == ([0], How.SCALED_DOWN)
    for entry in ours.entries:
        assert entry.details["samples"] == entry.details["rows"] == 2
        offloaded = 2 * 2 * needles.num_tokens(entry.column) * 32 * 4 / 1e9
        assert entry.details["host_gb"] == pytest.approx(
            offloaded * (entry.model == DRT1), rel=1e-4
        )
        assert "steps" in entry.details


def test_a_full_run_covers_the_printed_lengths():
    for name, table in TABLES.items():
        printed = REPRODUCTION.published.by_id[table]
        columns = [column for column in printed.columns if column != "Retrieval"]
        assert set(columns) <= set(needles.TABLES[name].columns) <= set(needles.SAMPLES)
        assert set(needles.TABLES[name].models) <= {row.model for row in printed.rows}


def test_stages_follow_one_another():
    options = Options(Path("out"), (), torch.device("cpu"), dry_run=False, data="texts")
    runs = needles.runs_of(needles.EIGHT_PATHS, DRT2, 1, options)
    assert len(runs) == sum(len(table.stages) for table in needles.TABLES.values())
    assert next(iter(runs.values())).init_from is None
    for (before, _), (_, after) in pairwise(runs.items()):
        assert after.init_from == str(before / "model")
    assert {config.data.text.source for config in runs.values()} == {"texts"}
    assert {config.data.chunk_size for config in runs.values()} == {64}
    landmark = [*needles.runs_of(PASSKEY, LANDMARK, 0, options).values()]
    assert [config.seq_len for config in landmark] == [512, *[768] * 4]
    assert {config.batch_size for config in landmark} == {16}, "short rows, so more of them"
