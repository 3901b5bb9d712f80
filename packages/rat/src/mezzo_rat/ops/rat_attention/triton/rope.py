"""RoPE from a table of angles, in one pass over memory."""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_rat.ops.rat_attention.triton.plan import Plan


@triton.jit(do_not_specialize=["rows", "T", "stride_p"])
def rotate_kernel(
    x, y, places, cos, sin, rows, T, stride_b, stride_t, stride_p,
    H: tl.constexpr, D: tl.constexpr, INVERSE: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rotate BM heads of tokens."""
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)[:, None]
    o_d = tl.arange(0, D)[None, :]
    m = o_m < rows
    i_b, i_t, i_h = o_m // H // T, o_m // H % T, o_m % H
    p_x = x + i_b * stride_b + i_t * stride_t + i_h * D
    place = tl.load(places + i_b * stride_p + i_t, mask=m, other=0).to(tl.int64)
    half: tl.constexpr = D // 2
    b_x = tl.load(p_x + o_d, mask=m, other=0.0).to(tl.float32)
    b_other = tl.load(p_x + (o_d + half) % D, mask=m, other=0.0).to(tl.float32)
    b_cos = tl.load(cos + place * half + o_d % half, mask=m, other=0.0)
    b_sin = tl.load(sin + place * half + o_d % half, mask=m, other=0.0)
    # The left half gets minus the right half. For the inverse rotation the right gets minus the
    # left.
    minus = (o_d >= half) if INVERSE else (o_d < half)
    b_y = b_x * b_cos + tl.where(minus, -b_other, b_other) * b_sin
    tl.store(y + o_m * D + o_d, b_y.to(y.dtype.element_ty), mask=m)


def rotate(
    x: Tensor,
    places: Tensor,
    angles: tuple[Tensor, Tensor],
    dtype: torch.dtype,
    *,
    inverse: bool = False,
) -> Tensor:
    """Rotate x (B, T, H, D) by the angles at `places`, or rotate it back.

    Args:
        x: the heads of a token must be adjacent in memory; rows and tokens may have any stride.
        places: (1 or B, T) int32, the row of the table for each token.
        angles: cosines and sines (P, D/2) float32.
        dtype: of the result.
        inverse: rotate back.

    Returns:
        (B, T, H, D), contiguous.
    """
    B, T, H, D = x.shape
    y = torch.empty((B, T, H, D), dtype=dtype, device=x.device)
    rows, BM = B * T * H, max(4096 // D, 1)
    if rows:
        with torch.cuda.device_of(x):
            rotate_kernel[(ceil_div(rows, BM),)](
                x, y, places, *angles, rows, T, x.stride(0), x.stride(1),
                places.stride(0) if places.shape[0] > 1 else 0,
                H=H, D=D, INVERSE=inverse, BM=BM, num_warps=4,
            )  # fmt: skip
    return y


def turn(
    x: Tensor, places: Tensor, plan: Plan, dtype: torch.dtype, *, inverse: bool = False
) -> Tensor:
    """Rotate x (B, T, H, D) by the plan's angles, if it has any; return it contiguous."""
    if plan.angles is None:
        return x.to(dtype).contiguous()
    return rotate(x, places, plan.angles, dtype, inverse=inverse)


def rotated_queries(x: Tensor, plan: Plan) -> Tensor:
    """Return the rotated queries (B, T, G, D) of a projection, contiguous."""
    start = plan.sizes.offsets["OQ"]
    G, D = plan.sizes.G, plan.sizes.D
    q = x[..., start : start + G * D].unflatten(-1, (G, D))
    return turn(q, plan.q_places, plan, x.dtype)
