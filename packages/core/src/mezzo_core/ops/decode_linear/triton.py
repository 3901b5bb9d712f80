"""A linear layer on one row, on a GPU. Nearly all of its time is spent reading the weights.

A program multiplies x by one or a few rows of W, with all of K in one tile. Many small programs
keep more loads in flight than a few long ones. Each program recomputes the norm of x: x is small
and in the L2 cache, so this is faster than another launch.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2

ROWS_WITH_NORM = 4
"""Rows of W per program with a norm: they share the cost of reading x and the norm's weight."""


@triton.jit(do_not_specialize=["N"])
def decode_linear_fwd_kernel(
    x, weight, bias, norm_weight, y, N, norm_eps, stride_w,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply x by BN rows of W."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_n, m_k = o_n < N, o_k < K
    p_w = weight + o_n[:, None] * stride_w + o_k[None, :]
    m_w = m_n[:, None] & m_k[None, :]
    b_w = tl.load(p_w, mask=m_w, other=0.0)
    b_x = tl.load(x + o_k, mask=m_k, other=0.0)
    if norm_weight is None:
        b_x = b_x.to(b_w.dtype).to(tl.float32)
        b_y = tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
    else:
        b_x = b_x.to(tl.float32)
        b_norm = tl.load(norm_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
        b_y = tl.sum(b_w.to(tl.float32) * (b_x * b_norm)[None, :], axis=1)
        b_y *= tl.rsqrt(tl.sum(b_x * b_x, axis=0) / K + norm_eps)
    if bias is not None:
        b_y += tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    tl.store(y + o_n, b_y.to(y.dtype.element_ty), mask=m_n)


def decode_linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    """Multiply; arguments and result as in `reference.decode_linear_fwd`."""
    N, K = weight.shape
    y = torch.empty((*x.shape[:-1], N), dtype=weight.dtype, device=x.device)
    x = x.contiguous()
    bias, norm_weight = (
        None if part is None else part.contiguous() for part in (bias, norm_weight)
    )
    if y.numel():
        BK = next_power_of_2(K)
        BN = 1 if norm_weight is None or BK > 4096 else ROWS_WITH_NORM
        with torch.cuda.device_of(weight):
            launch(
                decode_linear_fwd_kernel, (ceil_div(N, BN),),
                x, weight, bias, norm_weight, y, N, norm_eps, weight.stride(0),
                K=K, BN=BN, BK=BK, num_warps=4 if BK <= 8192 else 8,
            )  # fmt: skip
    return y
