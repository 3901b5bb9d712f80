"""The kernels compile for a GPU, on a machine that has none; a new length compiles nothing."""

from pathlib import Path

import pytest
from mezzo_core.testing.compile_only import run_compiling


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_and_once_for_all_lengths():
    run_compiling(Path(__file__).parent / "children" / "compile_kernels.py")
