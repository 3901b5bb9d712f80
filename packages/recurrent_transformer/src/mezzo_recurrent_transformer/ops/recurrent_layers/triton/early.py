"""Kernels of a step that begin before the kernel before them has ended.

A step is a chain of short kernels, so that a GPU would stand still between them for much of the
time. NVIDIA's Hopper and later GPUs can begin a kernel as soon as every program of the one before
has called `wait` (programmatic dependent launch). What such a kernel does before its own `wait` is
done while the kernel before still runs: it may read there what older kernels wrote, and write
nothing.
"""

from inspect import signature
from typing import Any

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.runtime import driver

# Rows of a layer, and of all layers, up to which all of a step's kernels are our own: cuBLAS, which
# has the products of more rows, does not begin early, and waiting costs time.
FEW, FEW_OF_ALL = 128, 384
HOPPER = 90
"""The first NVIDIA GPUs that can, by their compute capability times ten."""
CAN_COMPILE = "_semantic" in signature(gdc_wait).parameters
"""Whether Triton can compile `wait`: Triton 3.4 gives these functions an argument they lack."""


def are_few(x: Tensor) -> bool:
    """Return whether the rows of x (m, s, B, C) are few."""
    m, s, B, _ = x.shape
    return s * B <= FEW and m * s * B <= FEW_OF_ALL


def early(x: Tensor) -> dict[str, Any]:
    """Return the constants of a launch on rows x (m, s, B, C) that begins early where that pays."""
    if CAN_COMPILE and are_few(x) and not knobs.runtime.interpret:
        target = driver.active.get_current_target()
        if target.backend == "cuda" and target.arch >= HOPPER:
            return {"EARLY": True, "launch_pdl": True}
    return {"EARLY": False}


@triton.jit
def wait(EARLY: tl.constexpr):
    """Wait for the end of the kernel before; then let the next one begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()
