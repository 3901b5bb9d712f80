"""What the kernels of decoding steps share: tile widths, loads of inputs, the last norm."""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_gsa.ops.gates.triton import swish
from mezzo_gsa.ops.norms.triton import gated_norm_kernel

# Programs that fill a large GPU, and the widths of tiles to choose from.
PROGRAMS, NARROW, WIDE = 256, 16, 64


@triton.jit
def load_mapped(x, o, m, MAP: tl.constexpr):
    """Load numbers in float32 and apply a feature map: "swish", "relu" or None."""
    b_x = tl.load(x + o, mask=m, other=0.0).to(tl.float32)
    if MAP == "swish":
        b_x = swish(b_x)
    elif MAP == "relu":
        b_x = tl.where(b_x < 0, 0.0, b_x)  # a maximum would replace NaN
    return b_x


def norm_heads(x: Tensor, weight: Tensor, z: Tensor | None, y: Tensor, eps: float) -> None:
    """Write RMSNorm(x) ⊙ swish(z) into y.

    Args:
        x: (B, C) float32, contiguous.
        weight: (D,); each group of D channels is normalized on its own.
        z: (B, C), or None: no gate.
        y: (B, C), contiguous.
        eps: of the norm.
    """
    (B, C), D = x.shape, weight.shape[0]
    if z is not None and z.stride(1) != 1:
        z = z.contiguous()
    with torch.cuda.device_of(x):
        launch(
            gated_norm_kernel, (B * C // D,),
            x, weight.contiguous(), z, y, B * C // D, 0 if z is None else z.stride(0), eps,
            N=C // D, D=D, BM=1, BD=next_power_of_2(D), SWISH=False, num_warps=8,
        )  # fmt: skip


def rows(x: Tensor | None) -> Tensor | None:
    """Return x (B, H, D), copied unless each row is contiguous; rows may have any distance."""
    if x is None or (x.stride(2) == 1 and x.stride(1) == x.shape[2]):
        return x
    return x.contiguous()


def tile(num_heads: int, width: int) -> int:
    """Return how many channels a program processes: fewer if there are few heads and rows."""
    size = WIDE
    while size > NARROW and num_heads * ceil_div(width, size) < PROGRAMS:
        size //= 2
    return size
