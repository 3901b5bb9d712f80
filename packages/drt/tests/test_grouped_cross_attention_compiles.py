"""The kernels of grouped cross-attention compile for a GPU; new lengths compile nothing."""

from pathlib import Path

import pytest
from mezzo_core.testing.compile_only import run_compiling


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper():
    run_compiling(Path(__file__).parent / "children" / "compile_grouped_cross_attention.py")
