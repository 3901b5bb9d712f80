"""Scores and outputs of the chunks of gated linear attention.

Scores (B, T, HQ, L) have, for each token, a column for every token of its chunk. A program computes
one chunk of one query head, or one tile of columns if the result is wide; i_h is that head's
key-value head.
"""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp

from mezzo_gsa.ops.chunking.triton.states import load_kept, load_state, locate_chunk
from mezzo_gsa.ops.gla.triton.gate import gate_columns
from mezzo_gsa.ops.gla.triton.pairs import add_channel_scores, join_scores, on_diagonal, pair_decays


@triton.jit
def load_rows(x, o_t, m_l, stride, i_h, D: tl.constexpr, o_d):
    """Return the columns o_d (BD,) of head i_h, (L, BD); zeros where there is no token."""
    m = m_l[:, None] & (o_d < D)[None, :]
    return tl.load(x + o_t[:, None] * stride + i_h * D + o_d[None, :], mask=m, other=0.0)


@triton.jit
def store_rows(x, o_t, m_l, stride, i_h, D: tl.constexpr, o_d, b_x):
    """Store the columns o_d (BD,) of head i_h."""
    m = m_l[:, None] & (o_d < D)[None, :]
    p_x = x + o_t[:, None] * stride + i_h * D + o_d[None, :]
    tl.store(p_x, b_x.to(x.dtype.element_ty), mask=m)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def scores_kernel(
    q, k, running, chunk_table, scores, weighted, T, N, stride_q, stride_k, scale,
    HQ: tl.constexpr, H: tl.constexpr, K: tl.constexpr, KG: tl.constexpr,
    L: tl.constexpr, BK: tl.constexpr, SEGMENT: tl.constexpr,
    LEVELS: tl.constexpr, MILD: tl.constexpr, INNER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the scores of the pairs of a chunk, and its queries decayed from the chunk's start."""
    i_c, i_hq = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    i_h = i_hq // (HQ // H)
    start, length, _ = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l = tl.arange(0, L)
    m_l = o_l < length
    o_t = start + o_l
    p_running = running + (start * H + i_h) * KG
    b_a = tl.zeros([L, L], tl.float32)
    b_across, b_own = b_a, tl.zeros([L], tl.float32)
    for d in range(0, K, BK):
        o_k = d + tl.arange(0, BK)
        m_k = o_k < K
        b_q = load_rows(q, o_t, m_l, stride_q, i_hq, K, o_k)
        b_k = load_rows(k, o_t, m_l, stride_k, i_h, K, o_k)
        p_g = p_running + gate_columns(o_k, KG)[None, :]
        m = m_l[:, None] & m_k[None, :]
        b_g = tl.load(p_g + o_l[:, None] * (H * KG), mask=m, other=0.0)
        b_weighted = scale * b_q.to(tl.float32) * exp(b_g.to(tl.float32))
        store_rows(weighted, o_t, m_l, HQ * K, i_hq, K, o_k, b_weighted)
        if KG == 1:
            b_a = tl.dot(b_q, tl.trans(b_k), b_a, input_precision=PRECISION)
        else:
            b_q, b_k = b_q.to(tl.float32), b_k.to(tl.float32)
            b_own += tl.sum(b_q * b_k, 1)
            b_a, b_across = add_channel_scores(
                b_a, b_across, b_q, b_k, b_g, p_g, o_l, m_k, length, H * KG, INNER,
                L, LEVELS, MILD, PRECISION,
            )  # fmt: skip
    if KG == 1:
        b_a *= pair_decays(p_running, o_l, m_l, H, L)
    else:
        b_a = join_scores(b_a, b_across, b_own, L)
    store_rows(scores, o_t, m_l, HQ * L, i_hq, L, o_l, scale * b_a)


@triton.jit(do_not_specialize=["T", "N"])
def outputs_kernel(
    x, scores, weights, states, starts, kept, chunk_table, y, T, N, stride_x,
    HX: tl.constexpr, HW: tl.constexpr, HS: tl.constexpr, HQ: tl.constexpr,
    K: tl.constexpr, V: tl.constexpr, L: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SEGMENT: tl.constexpr, PRECISION: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Write the outputs y = A x + W h, with x = v and with W the decayed queries.

    REVERSE: write the gradient of v, y = Aᵀ x + W dh, with x = do and with W the decayed keys. x, W
    and the states have HX, HW and HS heads; query heads share them in equal groups.
    """
    tiles: tl.constexpr = tl.cdiv(V, BV)  # a chunk's tiles run together, as they share A and W
    i_v, i_c = tl.program_id(0) % tiles, tl.program_id(0) // tiles // HQ
    i_hq = tl.program_id(0) // tiles % HQ
    start, length, i_s = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l, o_v = tl.arange(0, L), i_v * BV + tl.arange(0, BV)
    m_l = o_l < length
    o_t = start + o_l
    b_a = load_rows(scores, o_t, m_l, HQ * L, i_hq, L, o_l)
    b_x = load_rows(x, o_t, m_l, stride_x, i_hq // (HQ // HX), V, o_v)
    b_y = tl.dot(tl.trans(b_a) if REVERSE else b_a, b_x, input_precision=PRECISION)
    for d in range(0, K, BK):
        o_k = d + tl.arange(0, BK)
        b_w = load_rows(weights, o_t, m_l, HW * K, i_hq // (HQ // HW), K, o_k)
        i_h = i_hq // (HQ // HS)
        b_kept = load_kept(kept, i_c, i_h, o_k, HS, K)
        b_h = load_state(states, starts, b_kept, i_c, i_s, i_h, o_k, o_v, HS, K, V)
        b_y = tl.dot(b_w, b_h.to(b_w.dtype), b_y, input_precision=PRECISION)
    store_rows(y, o_t, m_l, HQ * V, i_hq, V, o_v, b_y)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def scores_bwd_kernel(
    do, v, running, chunk_table, dscores, own, T, N, stride_v, scale,
    HQ: tl.constexpr, H: tl.constexpr, V: tl.constexpr, KG: tl.constexpr,
    L: tl.constexpr, BV: tl.constexpr, SEGMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the products of queries and keys; with one gate a head, decayed.

    `dscores` has those of the pairs i < t, and zeros elsewhere. `own` has those of i = t.
    """
    i_c, i_hq = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    i_h = i_hq // (HQ // H)
    start, length, _ = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l = tl.arange(0, L)
    m_l = o_l < length
    o_t = start + o_l
    b_da = tl.zeros([L, L], tl.float32)
    for d in range(0, V, BV):
        o_v = d + tl.arange(0, BV)
        b_do = load_rows(do, o_t, m_l, HQ * V, i_hq, V, o_v)
        b_v = load_rows(v, o_t, m_l, stride_v, i_h, V, o_v)
        b_da = tl.dot(b_do, tl.trans(b_v), b_da, input_precision=PRECISION)
    if KG == 1:
        b_da *= pair_decays(running + start * H + i_h, o_l, m_l, H, L)
    b_da *= scale
    tl.store(own + o_t * HQ + i_hq, tl.sum(on_diagonal(b_da, L), 1), mask=m_l)
    b_da = tl.where(o_l[:, None] > o_l[None, :], b_da, 0.0)
    store_rows(dscores, o_t, m_l, HQ * L, i_hq, L, o_l, b_da)
