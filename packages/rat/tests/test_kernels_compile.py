"""The kernels compile for a GPU, on a machine that has none; a new length compiles nothing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


# Three processes, so that workers share the compiling.
@pytest.mark.slow
@pytest.mark.parametrize("part", ["rat_widths_and_lengths", "rat_forms", "gated_scan"])
def test_every_kernel_compiles_for_hopper_and_once_for_all_lengths(part):
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "children" / "compile_kernels.py"
    command = [sys.executable, str(script), part]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
