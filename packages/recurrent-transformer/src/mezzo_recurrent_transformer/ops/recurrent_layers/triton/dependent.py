"""Launches that overlap: on Hopper a kernel can be set up while the one before it still runs.

Within a tile's steps a kernel of few rows runs for three microseconds, and one more goes by before
the next kernel begins. Programmatic dependent launch hides it: the next kernel is launched when all
programs of this one have begun, and waits for what they write.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Rows of all layers up to which kernels overlap; beyond, they would take each other's place.
FEW = 384


@triton.jit
def wait_for_inputs(PDL: tl.constexpr):
    """Wait for the kernel before, and let the next one be launched; before any memory access."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


def overlapping(x: Tensor) -> dict[str, bool]:
    """Return options to launch a kernel over rows (m, s, B, C), which waits for its inputs."""
    m, s, B, _ = x.shape
    if m * s * B > FEW or not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] < 9:
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}
