"""What happens between the tokens of a chunk: the slots' weights, and their gradients.

What token i wrote has decayed by exp(G[t] - G[i]) when token t reads it, G being the running sum of
the log gates. Where G[t] >= -MILD, that is exp(G[t] + c) · exp(-G[i] - c) with c = MILD / 2, whose
factors lose no digits: one pair of products serves all such t. Other t take levels (see
`mezzo_gsa.ops.pivots`), each a pair of products with factors that never exceed one. The choice
depends on what came before t only, so outputs never depend on the future, not in one bit.

Each kernel has two forms: with levels (EXACT), for chunks that are `rough` in some slot, and
without, whose registers levels would cost. Both are launched, and each leaves the other's chunks
alone. With the gates of trained models nearly all chunks are mild. Factors have the type INNER, as
float16 has too few exponents for them.
"""

import triton
import triton.language as tl

from mezzo_gsa.ops.gsa.triton_gate import load_gate, own_strength
from mezzo_gsa.ops.triton_elementwise import write_strength
from mezzo_gsa.ops.triton_pivots import (
    at_level,
    dot_wide,
    level_factor,
    load_running,
    parting,
    suffix_sum,
)
from mezzo_gsa.ops.triton_states import load_kept, load_state, locate_chunk


@triton.jit
def mild_factors(b_running, EXACT: tl.constexpr, MILD: tl.constexpr):
    """Return exp(G + c) and exp(-G - c), (L, BM); zeros where the levels serve."""
    b_x = (b_running + 0.5 * MILD).to(tl.float32)
    b_up, b_down = tl.exp(b_x), tl.exp(-b_x)
    if EXACT:
        b_up = tl.where(b_running >= -MILD, b_up, 0.0)
        b_down = tl.where(b_running >= -MILD, b_down, 0.0)
    return b_up, b_down


@triton.jit
def causal(b_x, L: tl.constexpr):
    """Keep the pairs i <= t; zeros elsewhere."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] >= o_l[None, :], b_x, 0.0)


@triton.jit
def diagonal(b_x, L: tl.constexpr):
    """Return the diagonal (L, 1) of a square."""
    o_l = tl.arange(0, L)
    return tl.sum(tl.where(o_l[:, None] == o_l[None, :], b_x, 0.0), 1)[:, None]


@triton.jit
def on_diagonal(b_x, L: tl.constexpr):
    """Return the square with b_x (L,) on its diagonal."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] == o_l[None, :], b_x[:, None], 0.0)


@triton.jit
def weights_of(b_logits, m_m, BETWEEN: tl.constexpr):
    """Return p (L, BM): what stands between the passes; zeros in slots that do not exist."""
    if BETWEEN == "softmax":
        b_logits = tl.where(m_m[None, :], b_logits, float("-inf"))
        b_p = tl.exp(b_logits - tl.max(b_logits, 1)[:, None])
        return b_p / tl.sum(b_p, 1)[:, None]
    if BETWEEN == "swish":
        return b_logits * tl.sigmoid(b_logits)
    if BETWEEN == "relu":
        return tl.maximum(b_logits, 0.0)
    if BETWEEN == "relu_squared":
        return tl.maximum(b_logits, 0.0) * tl.maximum(b_logits, 0.0)
    return b_logits


@triton.jit
def weights_bwd(b_logits, b_p, b_dp, BETWEEN: tl.constexpr):
    """Return the gradient of the logits."""
    if BETWEEN == "softmax":
        return b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
    if BETWEEN == "swish":
        b_sigmoid = tl.sigmoid(b_logits)
        return b_dp * b_sigmoid * (1.0 + b_logits * (1.0 - b_sigmoid))
    if BETWEEN == "relu":
        return tl.where(b_logits > 0.0, b_dp, 0.0)
    if BETWEEN == "relu_squared":
        return 2.0 * tl.maximum(b_logits, 0.0) * b_dp
    return b_dp


@triton.jit(do_not_specialize=["T", "N", "scale"])
def slots_fwd_kernel(
    q, k, g, s, running, rough, states, starts, kept, chunk_table,
    squares, logits, weights, T, N, stride_q, stride_k, stride_g, scale,
    HQ: tl.constexpr, H: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr,
    SEGMENT: tl.constexpr, LEVELS: tl.constexpr, EXACT: tl.constexpr,
    MILD: tl.constexpr, INNER: tl.constexpr, BETWEEN: tl.constexpr, DAMPING: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the slots' weights in one chunk and query head.

    Writes the square of weights between tokens, which `tokens_kernel` applies, and `weights`, p
    with the decay since the chunk began.
    """
    i_c, i_hq = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    i_h = i_hq // (HQ // H)
    if (tl.load(rough + i_c * H + i_h) != 0) != EXACT:
        return
    dtype = q.dtype.element_ty
    start, length, i_s = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l, o_m = tl.arange(0, L), tl.arange(0, BM)
    m_l, m_m = o_l < length, o_m < M
    m = m_l[:, None] & m_m[None, :]
    o_t = start + o_l

    b_a = tl.zeros([L, L], tl.float32)
    b_logits = tl.zeros([L, BM], tl.float32)
    b_kept = load_kept(kept, i_c, i_h, o_m, H, M)
    for d in range(0, K, BK):
        o_d = d + tl.arange(0, BK)
        m_d = m_l[:, None] & (o_d < K)[None, :]
        b_q = tl.load(q + o_t[:, None] * stride_q + i_hq * K + o_d[None, :], mask=m_d, other=0.0)
        b_k = tl.load(k + o_t[:, None] * stride_k + i_h * K + o_d[None, :], mask=m_d, other=0.0)
        b_h = load_state(states, starts, b_kept, i_c, i_s, i_h, o_m, o_d, H, M, K)
        b_a = tl.dot(b_q, tl.trans(b_k), b_a, input_precision=PRECISION)
        b_logits = tl.dot(b_q, tl.trans(b_h.to(dtype)), b_logits, input_precision=PRECISION)

    p_running = running + (start * H + i_h) * M + o_m[None, :]
    b_running = load_running(p_running, o_l, m_m, length, H * M)
    b_g = load_gate(g, o_t[:, None] * stride_g + i_h * M + o_m[None, :], m, DAMPING)
    b_s = own_strength(s, b_g, (o_t[:, None] * H + i_h) * M + o_m[None, :], m)
    b_keep = tl.exp(b_running.to(tl.float32))
    b_up, b_down = mild_factors(b_running, EXACT, MILD)
    b_near = dot_wide(causal(b_a, L).to(INNER), b_down * b_s, PRECISION)
    b_logits = b_logits * b_keep + b_up * b_near
    if EXACT:
        b_logits += tl.where(b_running >= -MILD, 0.0, b_s) * diagonal(b_a, L)
        b_a = b_a.to(INNER)
        for level in range(LEVELS):
            b_x = level_factor(p_running, b_running, o_l, m_m, length, H * M, level)
            b_part = at_level(b_a, parting(L), level).to(INNER)
            b_part = dot_wide(b_part, b_x * b_s, PRECISION)
            b_logits += tl.where(b_running >= -MILD, 0.0, b_x) * b_part
    b_logits *= scale
    o_hq = (o_t[:, None] * HQ + i_hq) * M + o_m[None, :]
    b_p = weights_of(b_logits, m_m, BETWEEN)
    tl.store(weights + o_hq, (b_p * b_keep).to(dtype), mask=m)
    if logits is not None:  # kept for the backward
        tl.store(logits + o_hq, b_logits, mask=m)

    b_b = tl.dot(
        (b_p * b_up).to(INNER), tl.trans((b_down * b_s).to(INNER)), input_precision=PRECISION
    )
    b_b = causal(b_b, L)
    if EXACT:
        b_b += on_diagonal(tl.sum(tl.where(b_running >= -MILD, 0.0, b_p * b_s), 1), L)
        for level in range(LEVELS):
            b_x = level_factor(p_running, b_running, o_l, m_m, length, H * M, level)
            b_px = tl.where(b_running >= -MILD, 0.0, b_p * b_x).to(INNER)
            b_far = tl.dot(b_px, tl.trans((b_x * b_s).to(INNER)), input_precision=PRECISION)
            b_b += at_level(b_far, parting(L), level)
    p_square = squares + tl.program_id(0).to(tl.int64) * (L * L)
    tl.store(p_square + o_l[:, None] * L + o_l[None, :], b_b.to(INNER))


@triton.jit
def load_weights(
    logits, dlogits, o_hq, m, m_m, BETWEEN: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """Return what weighs the slots in a pass (L, BM): p, or the gradient of the logits."""
    if VALUES:
        b_logits = tl.load(logits + o_hq, mask=m, other=0.0)
        return tl.where(m, weights_of(b_logits, m_m, BETWEEN), 0.0)
    return tl.load(dlogits + o_hq, mask=m, other=0.0)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def slots_bwd_kernel(
    x, y, g, running, strength, rough, logits, states, starts, kept, dstates, dstarts, dkept,
    chunk_table, dlogits, weights, part_dg, part_ds, squares, dg, ds,
    T, N, stride_x, stride_y, stride_g, stride_dg, scale,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr,
    SEGMENT: tl.constexpr, LEVELS: tl.constexpr, EXACT: tl.constexpr,
    MILD: tl.constexpr, INNER: tl.constexpr, BETWEEN: tl.constexpr, DAMPING: tl.constexpr,
    OWN_STRENGTH: tl.constexpr, VALUES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Pull gradients back through one pass, in one chunk and query head.

    VALUES: the second pass, x = do, y = v, weighted by p: writes `dlogits` (scaled for the other
    pass), `weights` = dlogits ⊙ exp(G), and its part of dg and ds. Else the first pass, x = q,
    y = k, weighted by dlogits: writes dg and ds, from both parts. Both write the square of weights
    between tokens, which `tokens_kernel` applies.

    The gate's gradient: the decay contributes, for each slot, the sum over the tokens that follow
    of weight · output - s · ds inside the chunk, and <h, dh> at its end; s = 1 - exp(g) adds
    -exp(g) ds.
    """
    i_c, i_hq = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    i_h = i_hq // (HQ // H)
    if (tl.load(rough + i_c * H + i_h) != 0) != EXACT:
        return
    dtype = y.dtype.element_ty
    start, length, i_s = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l, o_m = tl.arange(0, L), tl.arange(0, BM)
    m_l, m_m = o_l < length, o_m < M
    m = m_l[:, None] & m_m[None, :]
    o_t = start + o_l

    b_a = tl.zeros([L, L], tl.float32)
    b_ds = tl.zeros([L, BM], tl.float32)
    b_dp = tl.zeros([L, BM], tl.float32)
    b_end = tl.zeros([BM], tl.float32)
    b_kept = load_kept(kept, i_c, i_h, o_m, H, M)
    b_dkept = load_kept(dkept, i_c, i_hq, o_m, HQ, M)
    for d in range(0, D, BD):
        o_d = d + tl.arange(0, BD)
        m_d = m_l[:, None] & (o_d < D)[None, :]
        b_x = tl.load(x + o_t[:, None] * stride_x + i_hq * D + o_d[None, :], mask=m_d, other=0.0)
        b_y = tl.load(y + o_t[:, None] * stride_y + i_h * D + o_d[None, :], mask=m_d, other=0.0)
        b_h = load_state(states, starts, b_kept, i_c, i_s, i_h, o_m, o_d, H, M, D)
        b_dh = load_state(dstates, dstarts, b_dkept, i_c, i_s, i_hq, o_m, o_d, HQ, M, D)
        b_a = tl.dot(b_x, tl.trans(b_y), b_a, input_precision=PRECISION)
        b_ds = tl.dot(b_y, tl.trans(b_dh.to(dtype)), b_ds, input_precision=PRECISION)
        if VALUES:
            b_dp = tl.dot(b_x, tl.trans(b_h.to(dtype)), b_dp, input_precision=PRECISION)
        b_end += tl.sum(b_h * b_dh, 1)

    # What the stages that follow are made of is loaded by each of them anew, behind a barrier:
    # registers are short, and it is near.
    p_running = running + (start * H + i_h) * M + o_m[None, :]
    o_h = (o_t[:, None] * H + i_h) * M + o_m[None, :]
    o_hq = (o_t[:, None] * HQ + i_hq) * M + o_m[None, :]
    b_near = causal(b_a, L).to(INNER)
    if VALUES:
        b_running = load_running(p_running, o_l, m_m, length, H * M)
        b_up, b_down = mild_factors(b_running, EXACT, MILD)
        b_s = tl.load(strength + o_h, mask=m, other=0.0)
        b_keep = tl.exp(b_running.to(tl.float32))
        b_inside = dot_wide(b_near, b_down * b_s, PRECISION)
        b_dp = b_dp * b_keep + b_up * b_inside
        if EXACT:
            b_dp += tl.where(b_running >= -MILD, 0.0, b_s) * diagonal(b_near.to(tl.float32), L)
            for level in range(LEVELS):
                b_x = level_factor(p_running, b_running, o_l, m_m, length, H * M, level)
                b_part = at_level(b_near, parting(L), level).to(INNER)
                b_part = dot_wide(b_part, b_x * b_s, PRECISION)
                b_dp += tl.where(b_running >= -MILD, 0.0, b_x) * b_part
        b_logits = tl.load(logits + o_hq, mask=m, other=0.0)
        b_w = tl.where(m, weights_of(b_logits, m_m, BETWEEN), 0.0)
        b_dlogits = tl.where(m, weights_bwd(b_logits, b_w, b_dp, BETWEEN), 0.0)
        tl.store(part_dg + o_hq, b_w * b_dp + b_dlogits * b_logits, mask=m)
        b_dlogits *= scale
        tl.store(dlogits + o_hq, b_dlogits, mask=m)
        tl.store(weights + o_hq, (b_dlogits * b_keep).to(dtype), mask=m)

    tl.debug_barrier()
    b_running = load_running(p_running, o_l, m_m, length, H * M)
    b_total = tl.load(running + ((start + length - 1) * H + i_h) * M + o_m,
                      mask=m_m & (length > 0), other=0.0)  # fmt: skip
    b_s = tl.load(strength + o_h, mask=m, other=0.0)
    b_w = load_weights(logits, dlogits, o_hq, m, m_m, BETWEEN, VALUES)
    b_ds *= tl.exp((b_total[None, :] - b_running).to(tl.float32))
    b_end = b_end * tl.exp(b_total.to(tl.float32)) + tl.sum(b_s * b_ds, 0)
    b_up, b_down = mild_factors(b_running, EXACT, MILD)
    b_ds += b_down * dot_wide(tl.trans(b_near), b_w * b_up, PRECISION)
    if EXACT:
        b_ds += tl.where(b_running >= -MILD, 0.0, b_w) * diagonal(b_near.to(tl.float32), L)
        for level in range(LEVELS):
            b_x = level_factor(p_running, b_running, o_l, m_m, length, H * M, level)
            b_wx = tl.where(b_running >= -MILD, 0.0, b_w * b_x)
            b_past = tl.trans(at_level(b_near, parting(L), level).to(INNER))
            b_ds += b_x * dot_wide(b_past, b_wx, PRECISION)
    b_flow = -b_s * b_ds
    if VALUES:
        b_flow += tl.load(part_dg + o_hq, mask=m, other=0.0)
    b_dg = b_end[None, :] + suffix_sum(b_flow, L, PRECISION)
    b_g = load_gate(g, o_t[:, None] * stride_g + i_h * M + o_m[None, :], m, DAMPING)
    if not OWN_STRENGTH:
        b_dg -= tl.exp(b_g) * b_ds
    if VALUES:
        tl.debug_barrier()  # all have read what this overwrites
        tl.store(part_dg + o_hq, b_dg, mask=m)
        if OWN_STRENGTH:
            tl.store(part_ds + o_hq, b_ds, mask=m)
    else:
        b_dg += tl.load(part_dg + o_hq, mask=m, other=0.0)
        if DAMPING is not None:  # g = log sigmoid(x) / DAMPING: dg/dx = (1 - sigmoid(x)) / DAMPING
            b_dg *= write_strength(b_g * DAMPING) / DAMPING
        o_dg = o_t[:, None] * stride_dg + i_hq * M + o_m[None, :]
        tl.store(dg + o_dg, b_dg.to(dg.dtype.element_ty), mask=m)
        if OWN_STRENGTH:
            tl.store(ds + o_hq, b_ds + tl.load(part_ds + o_hq, mask=m, other=0.0), mask=m)

    tl.debug_barrier()
    b_running = load_running(p_running, o_l, m_m, length, H * M)
    b_up, b_down = mild_factors(b_running, EXACT, MILD)
    b_s = tl.load(strength + o_h, mask=m, other=0.0)
    b_w = load_weights(logits, dlogits, o_hq, m, m_m, BETWEEN, VALUES)
    b_b = tl.dot(b_w * b_up, tl.trans(b_down * b_s), input_precision=PRECISION)
    b_b = causal(b_b, L)
    if EXACT:
        b_b += on_diagonal(tl.sum(tl.where(b_running >= -MILD, 0.0, b_w * b_s), 1), L)
        for level in range(LEVELS):
            b_x = level_factor(p_running, b_running, o_l, m_m, length, H * M, level)
            b_wx = tl.where(b_running >= -MILD, 0.0, b_w * b_x).to(INNER)
            b_far = tl.dot(b_wx, tl.trans((b_x * b_s).to(INNER)), input_precision=PRECISION)
            b_b += at_level(b_far, parting(L), level)
    p_square = squares + tl.program_id(0).to(tl.int64) * (L * L)
    tl.store(p_square + o_l[:, None] * L + o_l[None, :], b_b.to(INNER))
