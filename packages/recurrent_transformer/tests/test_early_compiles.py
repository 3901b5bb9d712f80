"""The kernels of a step that begin early compile for a GPU, on a machine that has none."""

from pathlib import Path

import pytest
from mezzo_core.testing.compile_only import run_compiling

early = pytest.importorskip("mezzo_recurrent_transformer.ops.recurrent_layers.triton.early")


@pytest.mark.slow
@pytest.mark.skipif(not early.CAN_COMPILE, reason="Triton 3.4 compiles no kernel that waits")
def test_all_kernels_of_a_step_begin_early_where_rows_are_few_and_write_nothing_before_they_wait():
    run_compiling(Path(__file__).parent / "children" / "compile_early.py")
