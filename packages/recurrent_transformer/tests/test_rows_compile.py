"""The kernels of single rows compile for a GPU, on a machine that has none."""

from pathlib import Path

import pytest
from mezzo_core.testing.compile_only import run_compiling

pytest.importorskip("triton")


@pytest.mark.slow
def test_every_row_kernel_compiles_for_hopper_and_once_for_all_lengths():
    run_compiling(Path(__file__).parent / "children" / "compile_rows.py")
