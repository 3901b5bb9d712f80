"""Gradients of queries, keys and gates of the chunks of gated linear attention.

As for the scores, the pairs of a chunk are those inside each half, and those of a token in the
right half with one in the left. So no product is computed for pairs i > t of different halves, and
the tiles of a half fit in registers.
"""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp

from mezzo_gsa.ops.chunking.triton.products import dot_wide, suffix_sum
from mezzo_gsa.ops.chunking.triton.states import load_kept, load_state, locate_chunk
from mezzo_gsa.ops.gla.triton.gate import gate_columns
from mezzo_gsa.ops.gla.triton.pairs import on_diagonal, scores_bwd_of_half
from mezzo_gsa.ops.gla.triton.scores import load_rows, store_rows


@triton.jit
def load_square(x, start, length, stride, i_h, o_row, o_column, L: tl.constexpr):
    """Return rows and columns of the square (L, L) of a chunk and head."""
    p_x = x + (start + o_row)[:, None] * stride + i_h * L + o_column[None, :]
    return tl.load(p_x, mask=(o_row < length)[:, None], other=0.0)


@triton.jit
def borders_bwd(
    do, v, states, starts, kept, dstates, dstarts, dkept, i_c, i_s, i_h, i_hq, start, length, o_k,
    stride_v,
    HQ: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return do hᵀ and v dh'ᵀ of both halves, and <h, dh'> (BK,).

    h is the state at the chunk's start, dh' the gradient of the state at its end.
    """
    o_l = tl.arange(0, L // 2)
    o_r = o_l + L // 2
    b_dq_l = tl.zeros([L // 2, BK], tl.float32)
    b_dq_r, b_dk_l, b_dk_r = b_dq_l, b_dq_l, b_dq_l
    b_end = tl.zeros([BK], tl.float32)
    b_kept = load_kept(kept, i_c, i_h, o_k, H, K)
    b_dkept = load_kept(dkept, i_c, i_hq, o_k, HQ, K)
    for d in range(0, V, BV):
        o_v = d + tl.arange(0, BV)
        b_h = load_state(states, starts, b_kept, i_c, i_s, i_h, o_k, o_v, H, K, V)
        b_dh = load_state(dstates, dstarts, b_dkept, i_c, i_s, i_hq, o_k, o_v, HQ, K, V)
        b_end += tl.sum(b_h * b_dh, 1)
        b_h, b_dh = tl.trans(b_h.to(v.dtype.element_ty)), tl.trans(b_dh.to(v.dtype.element_ty))
        b_do = load_rows(do, start + o_l, o_l < length, HQ * V, i_hq, V, o_v)
        b_dq_l = tl.dot(b_do, b_h, b_dq_l, input_precision=PRECISION)
        b_do = load_rows(do, start + o_r, o_r < length, HQ * V, i_hq, V, o_v)
        b_dq_r = tl.dot(b_do, b_h, b_dq_r, input_precision=PRECISION)
        b_v = load_rows(v, start + o_l, o_l < length, stride_v, i_h, V, o_v)
        b_dk_l = tl.dot(b_v, b_dh, b_dk_l, input_precision=PRECISION)
        b_v = load_rows(v, start + o_r, o_r < length, stride_v, i_h, V, o_v)
        b_dk_r = tl.dot(b_v, b_dh, b_dk_r, input_precision=PRECISION)
    return b_dq_l, b_dq_r, b_dk_l, b_dk_r, b_end


@triton.jit
def square_bwd(b_da, b_dq, b_dk, b_q, b_k, L: tl.constexpr, PRECISION: tl.constexpr):
    """Add to dq and dk the contribution of the pairs i < t of a half; b_da includes the decay."""
    o_l = tl.arange(0, L)
    b_da = tl.where(o_l[:, None] > o_l[None, :], b_da, 0.0).to(b_da.dtype)
    b_dq = tl.dot(b_da, b_k.to(b_da.dtype), b_dq, input_precision=PRECISION)
    b_dk = tl.dot(tl.trans(b_da), b_q.to(b_da.dtype), b_dk, input_precision=PRECISION)
    return b_dq, b_dk


@triton.jit
def store_half(
    dq, dk, dg, b_da, b_dq, b_dk, b_dg, b_q, b_k, o_t, m_l, i_hq, i_k, o_k,
    HQ: tl.constexpr, K: tl.constexpr, KG: tl.constexpr, L: tl.constexpr,
):  # fmt: skip
    """Store the gradients of a half; those of q and k include pairs of a token with itself."""
    if KG == 1:
        p_dg = dg + (o_t[:, None] * HQ + i_hq) * tl.num_programs(1) + i_k
        tl.store(p_dg, tl.sum(b_dg, 1, keep_dims=True), mask=m_l[:, None])
    else:
        store_rows(dg, o_t, m_l, HQ * K, i_hq, K, o_k, b_dg)
    b_own = tl.sum(on_diagonal(b_da.to(tl.float32), L), 1, keep_dims=True)
    store_rows(dq, o_t, m_l, HQ * K, i_hq, K, o_k, b_dq + b_own * b_k)
    store_rows(dk, o_t, m_l, HQ * K, i_hq, K, o_k, b_dk + b_own * b_q)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def keys_bwd_kernel(
    do, q, k, v, running, dscores, states, starts, kept, dstates, dstarts, dkept, chunk_table,
    dq, dk, dg, T, N, stride_q, stride_k, stride_v, scale,
    HQ: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KG: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SEGMENT: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of channels of q, k and g, for one query head.

    The gradient of the gate: a higher G[t] increases what t reads and decreases what others read of
    t, so the gradient of G[t] is q dq - k dk, without the pair of t with itself. g[t] is part of G
    of all tokens from t on, so their gradients are summed. It is also part of the decay of the
    chunk's last state h', which adds <h', dh'> for each channel. If each head has one gate, each
    tile writes one column.
    """
    i_c, i_hq, i_k = tl.program_id(0) // HQ, tl.program_id(0) % HQ, tl.program_id(1)
    i_h = i_hq // (HQ // H)
    start, length, i_s = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l, o_k = tl.arange(0, L // 2), i_k * BK + tl.arange(0, BK)
    o_r = o_l + L // 2
    m_l, m_r, m_k = o_l < length, o_r < length, o_k < K
    b_dq_l, b_dq_r, b_dk_l, b_dk_r, b_end = borders_bwd(
        do, v, states, starts, kept, dstates, dstarts, dkept, i_c, i_s, i_h, i_hq, start, length,
        o_k, stride_v, HQ, H, K, V, L, BK, BV, PRECISION,
    )  # fmt: skip
    p_g = running + (start * H + i_h) * KG + gate_columns(o_k, KG)[None, :]
    m, stride = m_k[None, :], H * KG
    b_g_l = tl.load(p_g + o_l[:, None] * stride, mask=m_l[:, None] & m, other=0.0)
    b_g_r = tl.load(p_g + o_r[:, None] * stride, mask=m_r[:, None] & m, other=0.0)
    b_total = tl.load(p_g + (length - 1) * stride, mask=m & (length > 0), other=0.0)
    b_q_l = load_rows(q, start + o_l, m_l, stride_q, i_hq, K, o_k).to(tl.float32)
    b_q_r = load_rows(q, start + o_r, m_r, stride_q, i_hq, K, o_k).to(tl.float32)
    b_k_l = load_rows(k, start + o_l, m_l, stride_k, i_h, K, o_k).to(tl.float32)
    b_k_r = load_rows(k, start + o_r, m_r, stride_k, i_h, K, o_k).to(tl.float32)
    b_dq_l *= scale * exp(b_g_l.to(tl.float32))
    b_dq_r *= scale * exp(b_g_r.to(tl.float32))
    b_dk_l *= exp(-tl.abs(b_total - b_g_l).to(tl.float32))
    b_dk_r *= exp(-tl.abs(b_total - b_g_r).to(tl.float32))
    b_last = b_end[None, :] * exp(b_total.to(tl.float32))
    b_last += tl.sum(b_k_l * b_dk_l + b_k_r * b_dk_r, 0, keep_dims=True)
    b_da_l = load_square(dscores, start, length, HQ * L, i_hq, o_l, o_l, L)
    b_da_r = load_square(dscores, start, length, HQ * L, i_hq, o_r, o_r, L)
    b_far = load_square(dscores, start, length, HQ * L, i_hq, o_r, o_l, L)
    if KG == 1:
        b_dq_l, b_dk_l = square_bwd(b_da_l, b_dq_l, b_dk_l, b_q_l, b_k_l, L // 2, PRECISION)
        b_dq_r, b_dk_r = square_bwd(b_da_r, b_dq_r, b_dk_r, b_q_r, b_k_r, L // 2, PRECISION)
        b_dq_r = tl.dot(b_far, b_k_l.to(b_far.dtype), b_dq_r, input_precision=PRECISION)
        b_far = tl.trans(b_far)
        b_dk_l = tl.dot(b_far, b_q_r.to(b_far.dtype), b_dk_l, input_precision=PRECISION)
    else:
        o_middle = tl.minimum(L // 2, length) - 1
        b_middle = tl.load(p_g + o_middle * stride, mask=m & (length > 0), other=0.0)
        b_dq_l, b_dk_l = scores_bwd_of_half(
            b_da_l, b_dq_l, b_dk_l, b_q_l, b_k_l, b_g_l, b_middle * 0, p_g, o_l, m_k, length,
            stride, INNER, L // 2, LEVELS, MILD, PRECISION,
        )  # fmt: skip
        b_dq_r, b_dk_r = scores_bwd_of_half(
            b_da_r, b_dq_r, b_dk_r, b_q_r, b_k_r, b_g_r, b_middle, p_g, o_r, m_k, length,
            stride, INNER, L // 2, LEVELS, MILD, PRECISION,
        )  # fmt: skip
        b_read = exp(tl.minimum(b_g_r - b_middle, 0.0).to(tl.float32))
        b_write = exp(tl.minimum(b_middle - b_g_l, 0.0).to(tl.float32))
        b_far = b_far.to(INNER)
        b_dq_r += b_read * dot_wide(b_far, b_k_l * b_write, PRECISION)
        b_dk_l += b_write * dot_wide(tl.trans(b_far), b_q_r * b_read, PRECISION)
    b_x = b_q_r * b_dq_r - b_k_r * b_dk_r
    b_dg = b_last + suffix_sum(b_x, L // 2, PRECISION)
    store_half(
        dq, dk, dg, b_da_r, b_dq_r, b_dk_r, b_dg, b_q_r, b_k_r, start + o_r, m_r, i_hq, i_k, o_k,
        HQ, K, KG, L // 2,
    )  # fmt: skip
    b_last += tl.sum(b_x, 0, keep_dims=True)
    b_dg = b_last + suffix_sum(b_q_l * b_dq_l - b_k_l * b_dk_l, L // 2, PRECISION)
    store_half(
        dq, dk, dg, b_da_l, b_dq_l, b_dk_l, b_dg, b_q_l, b_k_l, start + o_l, m_l, i_hq, i_k, o_k,
        HQ, K, KG, L // 2,
    )  # fmt: skip
