"""The attention kernels compile for a GPU; new sizes compile nothing."""

from pathlib import Path

import pytest
from mezzo_core.testing.compile_only import run_compiling


@pytest.mark.slow
def test_every_attention_kernel_compiles_for_hopper_and_once_for_all_sizes():
    run_compiling(Path(__file__).parent / "children" / "compile_attention.py")
