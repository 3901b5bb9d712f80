"""All kernels compile for a GPU, on a machine that has none; new sizes compile nothing."""

from pathlib import Path

import pytest
from mezzo_core.testing.compile_only import run_compiling

early = pytest.importorskip("mezzo_recurrent_transformer.ops.recurrent_layers.triton.early")
SCRIPTS = ["compile_attention", "compile_rows"]
if early.CAN_COMPILE:  # Triton 3.4 compiles no kernel that waits
    SCRIPTS.append("compile_early")


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper_once_for_all_sizes_and_begins_early_where_rows_are_few():
    run_compiling(*(Path(__file__).parent / f"children/{script}.py" for script in SCRIPTS))
