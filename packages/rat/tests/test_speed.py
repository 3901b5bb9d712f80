"""The speed tables time batches of the sizes that they name."""

from dataclasses import replace

import pytest
from mezzo_rat.reproduction.speed import DRY, FULL, SPEEDS


def test_batches_are_as_large_as_the_tables_say():
    for name, make in SPEEDS.makers.items():
        for job in make(FULL)[1]:
            for cell, sizes in job.work.args[0].items():
                if name in ("table6", "table7"):
                    assert sizes["B"] * sizes["T"] == FULL.tokens
                elif name == "table8":
                    assert cell.group == f"B={sizes['B']}"
                    assert cell.column == str(sizes["position"])


@pytest.mark.gpu
def test_all_tables_run_on_a_gpu(tmp_path):
    small = replace(
        DRY, device="cuda", d_model=256, head_dim=64, tokens=2048, lengths=(512, 1024, 2048)
    )
    for name in SPEEDS.makers:
        ours = SPEEDS.measure(name, small, tmp_path, print)
        assert all(entry.value == "OOM" or entry.value > 0 for entry in ours.entries)
