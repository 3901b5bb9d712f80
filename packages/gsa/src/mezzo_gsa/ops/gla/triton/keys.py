"""Gradients of queries, keys and gates of the chunks of gated linear attention.

The products have a whole chunk as rows, which Hopper's matrix units need. A program has few
channels, because the factors of all pairs are on chip at once.
"""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp

from mezzo_gsa.ops.chunking.triton.products import suffix_sum
from mezzo_gsa.ops.chunking.triton.states import load_kept, load_state, locate_chunk
from mezzo_gsa.ops.gla.triton.gate import gate_columns
from mezzo_gsa.ops.gla.triton.pairs import channel_scores_bwd, load_pairs
from mezzo_gsa.ops.gla.triton.scores import load_rows, store_rows


@triton.jit
def borders_bwd(
    do, v, states, starts, kept, dstates, dstarts, dkept, i_c, i_s, i_h, i_hq, o_t, m_l, o_k,
    stride_v,
    HQ: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, L: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return do hᵀ and v dh'ᵀ (L, BK), and <h, dh'> (BK,).

    h is the state at the chunk's start, dh' the gradient of the state at its end.
    """
    b_dq, b_dk = tl.zeros([L, BK], tl.float32), tl.zeros([L, BK], tl.float32)
    b_end = tl.zeros([BK], tl.float32)
    b_kept = load_kept(kept, i_c, i_h, o_k, H, K)
    b_dkept = load_kept(dkept, i_c, i_hq, o_k, HQ, K)
    for d in range(0, V, BV):
        o_v = d + tl.arange(0, BV)
        b_do = load_rows(do, o_t, m_l, HQ * V, i_hq, V, o_v)
        b_v = load_rows(v, o_t, m_l, stride_v, i_h, V, o_v)
        b_h = load_state(states, starts, b_kept, i_c, i_s, i_h, o_k, o_v, H, K, V)
        b_dh = load_state(dstates, dstarts, b_dkept, i_c, i_s, i_hq, o_k, o_v, HQ, K, V)
        b_end += tl.sum(b_h * b_dh, 1)
        b_h, b_dh = tl.trans(b_h.to(v.dtype.element_ty)), tl.trans(b_dh.to(v.dtype.element_ty))
        b_dq = tl.dot(b_do, b_h, b_dq, input_precision=PRECISION)
        b_dk = tl.dot(b_v, b_dh, b_dk, input_precision=PRECISION)
    return b_dq, b_dk, b_end


@triton.jit(do_not_specialize=["T", "N", "scale"])
def keys_bwd_kernel(
    do, q, k, v, running, dscores, own, states, starts, kept, dstates, dstarts, dkept,
    chunk_table, dq, dk, dg, T, N, stride_q, stride_k, stride_v, scale,
    HQ: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, KG: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SEGMENT: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a tile of channels of q, k and g, for one query head.

    The gradient of the gate: a higher G[t] increases what t reads and decreases what others read of
    t, so the gradient of G[t] is q dq - k dk, without the pair of t with itself. All G from t on
    contain g[t], so their gradients are summed. The decay of the chunk's last state h' contains
    g[t] too, which adds <h', dh'> for each channel. If each head has one gate, each tile writes one
    column.
    """
    tiles: tl.constexpr = tl.cdiv(K, BK)  # a chunk's tiles run together, as they share do and v
    i_k, i_c = tl.program_id(0) % tiles, tl.program_id(0) // tiles // HQ
    i_hq = tl.program_id(0) // tiles % HQ
    i_h = i_hq // (HQ // H)
    start, length, i_s = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l, o_k = tl.arange(0, L), i_k * BK + tl.arange(0, BK)
    m_l, m_k = o_l < length, o_k < K
    o_t = start + o_l
    b_dq, b_dk, b_end = borders_bwd(
        do, v, states, starts, kept, dstates, dstarts, dkept, i_c, i_s, i_h, i_hq, o_t, m_l, o_k,
        stride_v, HQ, H, K, V, L, BK, BV, PRECISION,
    )  # fmt: skip
    p_g = running + (start * H + i_h) * KG + gate_columns(o_k, KG)[None, :]
    m, stride = m_k[None, :], H * KG
    b_g = tl.load(p_g + o_l[:, None] * stride, mask=m_l[:, None] & m, other=0.0)
    b_total = tl.load(p_g + (length - 1) * stride, mask=m & (length > 0), other=0.0)
    b_q = load_rows(q, o_t, m_l, stride_q, i_hq, K, o_k)
    b_k = load_rows(k, o_t, m_l, stride_k, i_h, K, o_k)
    b_dq *= scale * exp(b_g.to(tl.float32))
    b_dk *= exp(-tl.abs(b_total - b_g).to(tl.float32))
    b_last = b_end[None, :] * exp(b_total.to(tl.float32))
    b_last += tl.sum(b_k.to(tl.float32) * b_dk, 0, keep_dims=True)
    p_da = dscores + (start * HQ + i_hq) * L
    if KG == 1:
        b_da = load_pairs(p_da, o_l, m_l[:, None], length, HQ * L)
        b_dq = tl.dot(b_da, b_k, b_dq, input_precision=PRECISION)
        b_dk = tl.dot(tl.trans(b_da), b_q, b_dk, input_precision=PRECISION)
    else:
        b_dq, b_dk = channel_scores_bwd(
            b_dq, b_dk, b_q, b_k, b_g, p_g, p_da, o_l, m_k, length, stride, HQ * L, INNER,
            L, LEVELS, MILD, PRECISION,
        )  # fmt: skip
    b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
    b_own = tl.load(own + o_t * HQ + i_hq, mask=m_l, other=0.0)[:, None]
    store_rows(dq, o_t, m_l, HQ * K, i_hq, K, o_k, b_dq + b_own * b_k)
    store_rows(dk, o_t, m_l, HQ * K, i_hq, K, o_k, b_dk + b_own * b_q)
    b_dg = b_last + suffix_sum(b_q * b_dq - b_k * b_dk, L, PRECISION)
    if KG == 1:
        p_dg = dg + (o_t[:, None] * HQ + i_hq) * tiles + i_k
        tl.store(p_dg, tl.sum(b_dg, 1, keep_dims=True), mask=m_l[:, None])
    else:
        store_rows(dg, o_t, m_l, HQ * K, i_hq, K, o_k, b_dg)
