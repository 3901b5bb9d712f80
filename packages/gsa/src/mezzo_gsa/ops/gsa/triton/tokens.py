"""Kernels for tensors of tokens: swish of the inputs, the outputs, and gradients of tokens."""

import triton
import triton.language as tl

from mezzo_gsa.ops.chunking.triton.states import load_kept, load_state, locate_chunk
from mezzo_gsa.ops.gates.triton import sigmoid, swish


@triton.jit
def swish_kernel(x, y, size, BLOCK: tl.constexpr):
    """Write swish of x into y."""
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_x = tl.load(x + o, mask=o < size, other=0.0)
    tl.store(y + o, swish(b_x).to(y.dtype.element_ty), mask=o < size)


@triton.jit
def store_through_swish(grad, raw, o_grad, o_raw, m, b_grad):
    """Store the gradient of `raw` from b_grad, that of swish(raw); without `raw`, store b_grad."""
    if raw is not None:
        b_x = tl.load(raw + o_raw, mask=m, other=0.0).to(tl.float32)
        b_sigmoid = sigmoid(b_x)
        b_grad *= b_sigmoid * (1.0 + b_x * (1.0 - b_sigmoid))
    tl.store(grad + o_grad, b_grad.to(grad.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "N"])
def tokens_kernel(
    squares, x, y, write, weights, states, starts, kept, dstates, dstarts, dkept, chunk_table,
    raw_x, raw_y, left, right, T, N, stride_x, stride_y, stride_raw, stride_left, stride_right,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SEGMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Apply the square of weights between the tokens of a chunk, for one query head.

    It computes left = square y + weights h (outputs, dq) if `left` is given, and right = squareᵀ x
    + write dh (dk, dv) if `right` is given.
    """
    i_c, i_hq = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    i_h = i_hq // (HQ // H)
    dtype = y.dtype.element_ty
    start, length, i_s = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l, o_m = tl.arange(0, L), tl.arange(0, BM)
    m_l, m_m = o_l < length, o_m < M
    m = m_l[:, None] & m_m[None, :]
    o_t = start + o_l
    p_square = squares + tl.program_id(0).to(tl.int64) * (L * L)
    b_square = tl.load(p_square + o_l[:, None] * L + o_l[None, :])
    if right is not None:
        b_turned = tl.trans(b_square)
        o_h = (o_t[:, None] * H + i_h) * M + o_m[None, :]
        b_write = tl.load(write + o_h, mask=m, other=0.0)
        b_dkept = load_kept(dkept, i_c, i_hq, o_m, HQ, M)
    if left is not None:
        o_hq = (o_t[:, None] * HQ + i_hq) * M + o_m[None, :]
        b_weights = tl.load(weights + o_hq, mask=m, other=0.0)
        b_kept = load_kept(kept, i_c, i_h, o_m, H, M)
    for d in range(0, D, BD):
        o_d = d + tl.arange(0, BD)
        m_d = m_l[:, None] & (o_d < D)[None, :]
        o_x, o_y = i_hq * D + o_d[None, :], i_h * D + o_d[None, :]
        if right is not None:
            b_x = tl.load(x + o_t[:, None] * stride_x + o_x, mask=m_d, other=0.0)
            b_dh = load_state(dstates, dstarts, b_dkept, i_c, i_s, i_hq, o_m, o_d, HQ, M, D)
            b_right = tl.dot(b_turned, b_x.to(b_square.dtype), input_precision=PRECISION)
            b_right = tl.dot(b_write, b_dh.to(dtype), b_right, input_precision=PRECISION)
            o_grad, o_raw = o_t[:, None] * stride_right + o_x, o_t[:, None] * stride_raw + o_y
            store_through_swish(right, raw_y, o_grad, o_raw, m_d, b_right)
        if left is not None:
            b_y = tl.load(y + o_t[:, None] * stride_y + o_y, mask=m_d, other=0.0)
            b_h = load_state(states, starts, b_kept, i_c, i_s, i_h, o_m, o_d, H, M, D)
            b_left = tl.dot(b_square, b_y.to(b_square.dtype), input_precision=PRECISION)
            b_left = tl.dot(b_weights, b_h.to(dtype), b_left, input_precision=PRECISION)
            o_grad, o_raw = o_t[:, None] * stride_left + o_x, o_t[:, None] * stride_raw + o_x
            store_through_swish(left, raw_x, o_grad, o_raw, m_d, b_left)
