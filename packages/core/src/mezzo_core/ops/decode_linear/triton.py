"""A linear layer on few rows, on a GPU: each weight is read once, and nothing else counts.

A program owns BN rows of W with all of K, in one tile: every thread asks for its whole share of
the weights before it waits for any, and then keeps them for all rows of x. Nothing is split over
K, and the code for one row is the code for eight, so a row's result is the same to the bit in any
company. The norm of x is computed again by each program: x is small and in the L2 cache, and one
more launch would take longer.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Programs that keep a large GPU busy (about four for each of 132 multiprocessors), and the weights
# that a thread holds: enough loads in flight, without spilling.
PROGRAMS = 512
WEIGHTS = 64


@triton.jit(do_not_specialize=["R"])
def decode_linear_fwd_kernel(
    x, weight, bias, norm_weight, y, R, N, norm_eps, stride_x, stride_w,
    K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Multiply all R rows by BN rows of W."""
    o_n = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    o_k = tl.arange(0, BK)
    m_n, m_k = o_n < N, o_k < K
    p_w = weight + o_n[:, None] * stride_w + o_k[None, :]
    m_w = m_n[:, None] & m_k[None, :]
    b_w = tl.load(p_w, mask=m_w, other=0.0, eviction_policy="evict_first")
    b_x = tl.load(x + o_k, mask=m_k, other=0.0)
    if bias is not None:
        b_bias = tl.load(bias + o_n, mask=m_n, other=0.0).to(tl.float32)
    for i_r in range(R):
        # The next row is on its way while this one is summed.
        b_next = tl.load(x + (i_r + 1) * stride_x + o_k, mask=m_k & (i_r + 1 < R), other=0.0)
        b_x = b_x.to(tl.float32)
        if norm_weight is not None:
            b_norm = tl.load(norm_weight + o_k, mask=m_k, other=0.0).to(tl.float32)
            b_x = b_x * tl.rsqrt(tl.sum(b_x * b_x, axis=0) / K + norm_eps) * b_norm
        b_x = b_x.to(b_w.dtype).to(tl.float32)
        b_y = tl.sum(b_w.to(tl.float32) * b_x[None, :], axis=1)
        if bias is not None:
            b_y += b_bias
        tl.store(y + i_r * N + o_n, b_y.to(y.dtype.element_ty), mask=m_n)
        b_x = b_next


def decode_linear_fwd(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, norm_eps: float
) -> Tensor:
    """Multiply; arguments and result as in `reference.decode_linear_fwd`."""
    N, K = weight.shape
    y = torch.empty((*x.shape[:-1], N), dtype=weight.dtype, device=x.device)
    rows = x.reshape(-1, K)
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    bias, norm_weight = (
        None if part is None else part.contiguous() for part in (bias, norm_weight)
    )
    if y.numel():
        BN, BK, num_warps = tiling(N, K)
        with torch.cuda.device_of(x):
            decode_linear_fwd_kernel[(triton.cdiv(N, BN),)](
                rows, weight, bias, norm_weight, y, rows.shape[0], N, norm_eps,
                rows.stride(0), weight.stride(0), K=K, BN=BN, BK=BK, num_warps=num_warps,
            )  # fmt: skip
    return y


def tiling(N: int, K: int) -> tuple[int, int, int]:
    """Return BN and BK, the rows and columns of a program's tile of W, and its warps."""
    BK = triton.next_power_of_2(K)
    num_warps = min(max(BK // 512, 4), 16)
    # Two programs of 16 warps have the registers for half as many weights each.
    BN = max(WEIGHTS * 32 * min(num_warps, 8) // BK, 1)
    while BN > 1 and triton.cdiv(N, BN) < PROGRAMS:
        BN //= 2
    return BN, BK, num_warps
