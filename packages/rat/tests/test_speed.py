"""The speed tables on a CPU: what is as large as the tables say."""

from dataclasses import replace

import pytest
from mezzo_core.reproduction import generation_speed
from mezzo_core.reproduction.measurement import How
from mezzo_rat.reproduction.claims import REPRODUCTION
from mezzo_rat.reproduction.speed import DRY, FULL, MEASURERS, SPEEDS

SMALL = replace(DRY, models=("RNN", "Attention"), lengths=(64,))


def quiet(line):
    pass


def test_batches_are_as_large_as_the_tables_say():
    for name, make in SPEEDS.makers.items():
        for job in make(FULL)[1]:
            for cell, sizes in job.work.args[0].items():
                if name in ("table6", "table7"):
                    assert sizes["B"] * sizes["T"] == FULL.tokens
                elif name == "table8":
                    assert cell.group == f"B={sizes['B']}"
                    assert cell.column == str(sizes["position"])


def test_a_batch_that_does_not_fit_is_out_of_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(generation_speed, "free_memory", lambda device: 400_000)
    ours = MEASURERS["table8"](replace(SMALL, positions=(64,)), tmp_path, quiet)
    assert ours.typical("Attention", "64", "B=64") == "OOM"
    assert isinstance(ours.typical("RNN", "64", "B=64"), float)


def test_a_reproduction_measures_only_what_it_is_asked(tmp_path):
    ids = ["rat.table7", "rat.claim.short_slower", "rat.table12"]
    scales = {"smoke": replace(REPRODUCTION.scales["smoke"], sizes=SMALL)}
    found = replace(REPRODUCTION, scales=scales).reproduce(ids, "smoke", tmp_path)
    assert [finding.how for finding in found] == [
        How.OTHER_HARDWARE,
        How.NOT_ATTEMPTED,
        How.OTHER_HARDWARE,
    ]
    files = {path.stem for path in (tmp_path / "rat/measured").glob("*.json")}
    assert files == {"speed_table6", "speed_table7"}
    assert not (tmp_path / "rat/runs").exists()


@pytest.mark.gpu
def test_all_tables_run_on_a_gpu(tmp_path):
    small = replace(
        DRY, device="cuda", d_model=256, head_dim=64, tokens=2048, lengths=(512, 1024, 2048)
    )
    for measurer in MEASURERS.values():
        ours = measurer(small, tmp_path, quiet)
        assert all(entry.value == "OOM" or entry.value > 0 for entry in ours.entries)
