"""The shapes in public signatures are true: the ops' own tests pass with every call checked.

The hook wraps the functions of `api` modules, so it needs a process of its own. Tests of bad input
and of compiled graphs are left out: there the hook speaks first, or stands in the graph. So are
those of kernels: a signature holds whoever computes, and the interpreter takes most of the time.
"""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OPS = {
    "mezzo_rat.ops.linear_scan.api": "packages/rat/tests/ops/test_linear_scan.py",
    "mezzo_core.ops.online_softmax.api": "packages/core/tests/ops/test_online_softmax.py",
    "mezzo_core.ops.attention.api": "packages/core/tests/ops/test_attention.py",
    "mezzo_core.ops.decode_attention.api": "packages/core/tests/ops/test_decode_attention.py",
    "mezzo_gsa.ops.gla.api": "packages/gsa/tests/ops/test_gla.py",
    "mezzo_gsa.ops.gsa.api": "packages/gsa/tests/ops/test_gsa_op.py",
    "mezzo_gsa.ops.gsa.step": "packages/gsa/tests/ops/test_step_gsa.py",
    "mezzo_rat.ops.gated_scan.api": "packages/rat/tests/ops/test_gated_scan.py",
    "mezzo_rat.ops.rat_attention.api": "packages/rat/tests/ops/test_rat_attention.py",
}


@pytest.mark.slow
def test_every_call_fits_its_signature():
    hook = ",".join([*OPS, "beartype.beartype"])
    unwanted = "bad or named or compile or graph or opcheck or excludes or refuse or error or impl"
    command = [sys.executable, "-m", "pytest", "-q", "-x", f"--jaxtyping-packages={hook}"]
    done = subprocess.run(
        [*command, "-k", f"not ({unwanted} or triton)", *OPS.values()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


def test_the_hook_catches_a_wrong_shape(tmp_path):
    code = """
import pytest, torch
from jaxtyping import TypeCheckError
def test_widths_that_differ():
    from mezzo_core.ops.attention import attention
    q, k = torch.zeros(1, 4, 2, 8), torch.zeros(1, 4, 2, 6)
    with pytest.raises(TypeCheckError):
        attention(q, k, k)
"""
    (tmp_path / "test_hook.py").write_text(code)
    hook = "mezzo_core.ops.attention.api,beartype.beartype"
    command = [sys.executable, "-m", "pytest", "-q", f"--jaxtyping-packages={hook}", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
