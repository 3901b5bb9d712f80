"""The experiment on needles: what a full run is."""

import runpy
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import torch
from mezzo_core.reproduction import Options
from mezzo_drt.reproduction.claims import REPRODUCTION

SCRIPT = Path(__file__).parents[1] / "experiments/needles.py"
needles = SimpleNamespace(**runpy.run_path(str(SCRIPT)))
DRT2, LANDMARK = needles.DRT2, needles.LANDMARK
PASSKEY, TWO_HOP = needles.PASSKEY, needles.TWO_HOP
TABLES = {PASSKEY: "drt.table2.single_niah", TWO_HOP: "drt.table2.two_hop_niah"}


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
