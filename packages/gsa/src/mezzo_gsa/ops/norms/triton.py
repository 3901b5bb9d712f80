"""The norm with a gate on a GPU: a kernel forward, and one backward."""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_gsa.ops.gates.triton import sigmoid, swish

NUMBERS = 4096
"""Numbers that a program holds at a time, from one row or several."""
FULL = 528
"""Programs that fill a large GPU, four on each SM: each gives a part of the weight's gradient."""


@triton.jit
def load_gate(z, o_r, o_d, m, stride_z, N: tl.constexpr, D: tl.constexpr):
    """Return the logits (BM, BD) of the rows o_r, which are the N heads of each token in turn."""
    p_z = z + (o_r // N * stride_z + o_r % N * D)[:, None] + o_d[None, :]
    return tl.load(p_z, mask=m, other=0.0).to(tl.float32)


@triton.jit
def swish_slope(b_x):
    """Return the derivative of swish."""
    b_s = sigmoid(b_x)
    return b_s * (1.0 + b_x * (1.0 - b_s))


@triton.jit(do_not_specialize=["rows", "eps"])
def gated_norm_kernel(
    x, weight, z, y, rows, stride_z, eps,
    N: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SWISH: tl.constexpr,
):  # fmt: skip
    """Write RMSNorm(x), for BM rows; SWISH: of swish(x). With z, times swish(z)."""
    o_r, o_d = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM), tl.arange(0, BD)
    m = (o_r < rows)[:, None] & (o_d < D)[None, :]
    o_x = o_r[:, None] * D + o_d[None, :]
    b_x = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)
    if SWISH:
        b_x = swish(b_x)
    b_y = b_x * tl.rsqrt(tl.sum(b_x * b_x, 1) / D + eps)[:, None] * b_w[None, :]
    if z is not None:
        b_y *= swish(load_gate(z, o_r, o_d, m, stride_z, N, D))
    tl.store(y + o_x, b_y.to(y.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["rows", "eps"])
def gated_norm_bwd_kernel(
    dy, x, weight, z, dx, dz, parts, rows, stride_z, eps,
    N: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """Write dx and dz of every n-th BM rows, n programs, and their part of the weight's gradient.

    With u = x, or swish(x) without z, and n = u / RMS(u):
    du = (dn - n mean(dn n)) / RMS(u), where dn = dy w swish(z).
    """
    o_d = tl.arange(0, BD)
    b_w = tl.load(weight + o_d, mask=o_d < D, other=0.0).to(tl.float32)[None, :]
    b_dw = tl.zeros([BD], tl.float32)
    for i in range(tl.program_id(0), tl.cdiv(rows, BM), tl.num_programs(0)):
        o_r = tl.cast(i, tl.int64) * BM + tl.arange(0, BM)
        m = (o_r < rows)[:, None] & (o_d < D)[None, :]
        o_x = o_r[:, None] * D + o_d[None, :]
        b_x = tl.load(x + o_x, mask=m, other=0.0).to(tl.float32)
        b_g = tl.load(dy + o_x, mask=m, other=0.0).to(tl.float32)
        b_u = swish(b_x) if z is None else b_x
        b_r = tl.rsqrt(tl.sum(b_u * b_u, 1) / D + eps)[:, None]
        b_n = b_u * b_r
        if z is not None:
            b_z = load_gate(z, o_r, o_d, m, stride_z, N, D)
            b_dz = b_g * b_n * b_w * swish_slope(b_z)
            tl.store(dz + o_x, b_dz.to(dz.dtype.element_ty), mask=m)
            b_g *= swish(b_z)
        b_dw += tl.sum(b_g * b_n, 0)
        b_g *= b_w
        b_dx = b_r * (b_g - b_n * (tl.sum(b_g * b_n, 1) / D)[:, None])
        if z is None:
            b_dx *= swish_slope(b_x)
        tl.store(dx + o_x, b_dx.to(dx.dtype.element_ty), mask=m)
    tl.store(parts + tl.program_id(0) * D + o_d, b_dw, mask=o_d < D)


def run_norm(x: Tensor, weight: Tensor, z: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    """Return y (rows, D)."""
    x, (z, N, stride) = x.contiguous(), _gates(z)
    y = torch.empty_like(x, dtype=dtype)
    BM, BD = _tile(x)
    with torch.cuda.device_of(x):
        launch(
            gated_norm_kernel, (ceil_div(x.shape[0], BM),),
            x, weight.contiguous(), z, y, x.shape[0], stride, eps,
            N=N, D=x.shape[1], BM=BM, BD=BD, SWISH=z is None, num_warps=8 if BD > NUMBERS else 4,
        )  # fmt: skip
    return y


def run_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx (rows, D), the parts (programs, D) of the weight's gradient, and dz."""
    x, dy = x.contiguous(), dy.contiguous()
    dz = x.new_empty(0 if z is None else z.shape)
    z, N, stride = _gates(z)
    dx, BM, BD = torch.empty_like(x), *_tile(x)
    parts = torch.empty((count_parts(x), x.shape[1]), device=x.device)
    with torch.cuda.device_of(x):
        launch(
            gated_norm_bwd_kernel, (parts.shape[0],),
            dy, x, weight.contiguous(), z, dx, dz, parts, x.shape[0], stride, eps,
            N=N, D=x.shape[1], BM=BM, BD=BD, num_warps=8 if BD > NUMBERS else 4,
        )  # fmt: skip
    return dx, parts, dz


def count_parts(x: Tensor) -> int:
    """Return the number of programs of a backward."""
    return min(FULL, ceil_div(x.shape[0], _tile(x)[0]))


def _tile(x: Tensor) -> tuple[int, int]:
    """Return how many rows a program holds, and their width, a power of two."""
    BD = next_power_of_2(x.shape[1])
    return max(1, NUMBERS // BD), BD


def _gates(z: Tensor | None) -> tuple[Tensor | None, int, int]:
    """Return z with the numbers of a token side by side, its heads, and the stride of tokens."""
    if z is None:
        return None, 1, 0
    _, N, D = z.shape
    if z.stride(2) != 1 or (N > 1 and z.stride(1) != D):
        z = z.contiguous()
    return z, N, z.stride(0)
