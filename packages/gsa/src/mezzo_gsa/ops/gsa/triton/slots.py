"""Interactions between the tokens of a chunk: the slots' weights, and their gradients.

When token t reads what token i wrote, it has decayed by exp(G[t] - G[i]), where G is the running
sum of the log gates. A matrix product needs this as a factor of the row t and a factor of the
column i: exp(G[t] - P) exp(P - G[i]). The pivot P must be near G[t], or one of the factors
overflows. So the rows of each slot are divided into bands of WIDTH:

    -WIDTH (b + 1) < G[t] <= -WIDTH b        P = -WIDTH (b + 1/2)

Within its band a row's factors stay within exp(±WIDTH / 2), which float32 and bfloat16 represent
without a loss of digits. The factors of columns in earlier bands are smaller and at last zero,
because what these columns wrote has decayed. Each band needs a pair of products; `gate_kernel`
counts the bands of a chunk. The band of a row depends only on tokens up to it, so later tokens
change no bit of an output.

With mild gates a chunk has one band. Up to 64 slots it is faster to launch two kernels: BANDS "one"
for the chunks of one band, and "more" for the others. Each skips the other's chunks. "any" computes
all chunks.

Factors have the type INNER, as they exceed the range of float16.
"""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp

from mezzo_gsa.ops.chunking.triton.products import dot_wide, load_running, suffix_sum
from mezzo_gsa.ops.chunking.triton.states import load_kept, load_state, locate_chunk
from mezzo_gsa.ops.gates.triton import sigmoid
from mezzo_gsa.ops.gsa.triton.gate import load_bands, load_gate, own_strength


@triton.jit
def is_for(num_bands, BANDS: tl.constexpr):
    """Return whether a kernel of the form BANDS computes a chunk with num_bands bands."""
    if BANDS == "any":
        return True
    return (num_bands == 1) == (BANDS == "one")


@triton.jit
def band_factors(b_running, band, BANDS: tl.constexpr, WIDTH: tl.constexpr):
    """Return exp(G - P) of the rows in a band, and exp(P - G) of the columns up to it; else 0."""
    b_x = (b_running + WIDTH * (band + 0.5)).to(tl.float32)
    b_up, b_down = exp(b_x), exp(-b_x)
    if BANDS != "one":
        b_up = tl.where((b_x > -0.5 * WIDTH) & (b_x <= 0.5 * WIDTH), b_up, 0.0)
        b_down = tl.where(b_x > -0.5 * WIDTH, b_down, 0.0)
    return b_up, b_down


@triton.jit
def causal(b_x, L: tl.constexpr):
    """Keep the pairs i <= t; zeros elsewhere."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] >= o_l[None, :], b_x, 0.0)


@triton.jit
def with_diagonal(b_x, b_own, is_steep, L: tl.constexpr):
    """Return the square b_x (L, L) with b_own (L,) on the diagonal of the rows that are steep.

    In such rows nearly all weight is on the token itself, so the rounding of factors would be
    visible.
    """
    o_l = tl.arange(0, L)
    m = (o_l[:, None] == o_l[None, :]) & is_steep[:, None]
    return tl.where(m, b_own[:, None], b_x)


@triton.jit
def relu(b_x):
    """Return the larger of x and 0, or NaN."""
    return tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def weights_of(b_logits, m_m, BETWEEN: tl.constexpr):
    """Return p (L, BM), the weights of the slots; zeros in slots from M on."""
    if BETWEEN == "softmax":
        b_logits = tl.where(m_m[None, :], b_logits, float("-inf"))
        b_p = exp(b_logits - tl.max(b_logits, 1)[:, None])
        return b_p / tl.sum(b_p, 1)[:, None]
    if BETWEEN == "swish":
        return b_logits * sigmoid(b_logits)
    if BETWEEN == "relu":
        return relu(b_logits)
    if BETWEEN == "relu_squared":
        return relu(b_logits) * relu(b_logits)
    return b_logits


@triton.jit
def weights_bwd(b_logits, b_p, b_dp, BETWEEN: tl.constexpr):
    """Return the gradient of the logits."""
    if BETWEEN == "softmax":
        return b_p * (b_dp - tl.sum(b_p * b_dp, 1)[:, None])
    if BETWEEN == "swish":
        b_sigmoid = sigmoid(b_logits)
        return b_dp * b_sigmoid * (1.0 + b_logits * (1.0 - b_sigmoid))
    if BETWEEN == "relu":
        return tl.where(b_logits > 0.0, b_dp, 0.0)
    if BETWEEN == "relu_squared":
        return 2.0 * relu(b_logits) * b_dp
    return b_dp


@triton.jit(do_not_specialize=["T", "N", "scale"])
def slots_fwd_kernel(
    q, k, g, s, running, bands, states, starts, kept, chunk_table,
    squares, logits, weights, T, N, stride_q, stride_k, stride_g, scale,
    HQ: tl.constexpr, H: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, SEGMENT: tl.constexpr,
    M_TILES: tl.constexpr, BANDS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    BETWEEN: tl.constexpr, DAMPING: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the slots' weights in one chunk and query head.

    Writes the square (L, L) of weights between tokens, which `tokens_kernel` applies, and
    `weights`, which is p times the decay since the chunk began.
    """
    i_c, i_hq = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    i_h = i_hq // (HQ // H)
    num_bands = load_bands(bands, i_c, i_h, H, M_TILES)
    if not is_for(num_bands, BANDS):
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
    b_keep = exp(b_running.to(tl.float32))
    b_a = causal(b_a, L).to(INNER)
    b_logits *= b_keep
    for band in range(1 if BANDS == "one" else num_bands):
        b_up, b_down = band_factors(b_running, band, BANDS, WIDTH)
        # fma rounds once, in all forms of this kernel. Later tokens influence which form runs
        # (BANDS). As all forms round alike, later tokens change no bit of earlier outputs.
        b_logits = tl.fma(b_up, dot_wide(b_a, b_down * b_s, PRECISION), b_logits)
    b_logits *= scale
    o_hq = (o_t[:, None] * HQ + i_hq) * M + o_m[None, :]
    b_p = weights_of(b_logits, m_m, BETWEEN)
    tl.store(weights + o_hq, (b_p * b_keep).to(dtype), mask=m)
    if logits is not None:  # kept for the backward
        tl.store(logits + o_hq, b_logits, mask=m)

    b_b = tl.zeros([L, L], tl.float32)
    for band in range(1 if BANDS == "one" else num_bands):
        b_up, b_down = band_factors(b_running, band, BANDS, WIDTH)
        b_pu, b_ds = (b_p * b_up).to(INNER), (b_down * b_s).to(INNER)
        b_b = tl.dot(b_pu, tl.trans(b_ds), b_b, input_precision=PRECISION)
    b_b = causal(b_b, L)
    if BANDS != "one":
        b_own = tl.sum(b_p * b_s, 1)
        b_b = with_diagonal(b_b, b_own, tl.min(b_running, 1) <= -WIDTH, L)
    p_square = squares + tl.program_id(0).to(tl.int64) * (L * L)
    tl.store(p_square + o_l[:, None] * L + o_l[None, :], b_b.to(INNER))


@triton.jit
def load_weights(
    logits, dlogits, o_hq, m, m_m, BETWEEN: tl.constexpr, VALUES: tl.constexpr
):  # fmt: skip
    """Return the weights of the slots in a pass, (L, BM): p, or the gradient of the logits."""
    if VALUES:
        b_logits = tl.load(logits + o_hq, mask=m, other=0.0)
        return tl.where(m, weights_of(b_logits, m_m, BETWEEN), 0.0)
    return tl.load(dlogits + o_hq, mask=m, other=0.0)


@triton.jit(do_not_specialize=["T", "N", "scale"])
def slots_bwd_kernel(
    x, y, g, running, strength, bands, logits, states, starts, kept, dstates, dstarts, dkept,
    chunk_table, dlogits, weights, part_dg, part_ds, squares, dg, ds,
    T, N, stride_x, stride_y, stride_g, stride_dg, scale,
    HQ: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
    L: tl.constexpr, BM: tl.constexpr, BD: tl.constexpr, SEGMENT: tl.constexpr,
    M_TILES: tl.constexpr, BANDS: tl.constexpr, WIDTH: tl.constexpr, INNER: tl.constexpr,
    BETWEEN: tl.constexpr, DAMPING: tl.constexpr, OWN_STRENGTH: tl.constexpr, VALUES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of one pass, in one chunk and query head.

    With VALUES this is the second pass: x = do, y = v, and the weights are p. It writes `dlogits`
    (times the scale, for the other pass), `weights` = dlogits ⊙ exp(G), and its parts of dg and ds.
    Otherwise it is the first pass: x = q, y = k, and the weights are dlogits. It writes dg and ds,
    the sums of both parts. Both passes write the square of weights between tokens, which
    `tokens_kernel` applies.

    The gradient of the gate has two parts. By the decay, each slot of a token gets the sum of
    weight · output - s · ds over this token and those after it in the chunk, and <h, dh> at the
    chunk's end. By s = 1 - exp(g) it gets -exp(g) ds = (s - 1) ds.
    """
    i_c, i_hq = tl.program_id(0) // HQ, tl.program_id(0) % HQ
    i_h = i_hq // (HQ // H)
    num_bands = load_bands(bands, i_c, i_h, H, M_TILES)
    if not is_for(num_bands, BANDS):
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

    # Each of the following stages begins with a barrier and loads its inputs again: there are too
    # few registers to hold them, and they are still in the cache.
    p_running = running + (start * H + i_h) * M + o_m[None, :]
    o_h = (o_t[:, None] * H + i_h) * M + o_m[None, :]
    o_hq = (o_t[:, None] * HQ + i_hq) * M + o_m[None, :]
    b_near = causal(b_a, L).to(INNER)
    if VALUES:
        b_running = load_running(p_running, o_l, m_m, length, H * M)
        b_s = tl.load(strength + o_h, mask=m, other=0.0)
        b_keep = exp(b_running.to(tl.float32))
        b_dp *= b_keep
        for band in range(1 if BANDS == "one" else num_bands):
            b_up, b_down = band_factors(b_running, band, BANDS, WIDTH)
            b_dp += b_up * dot_wide(b_near, b_down * b_s, PRECISION)
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
    b_ds *= exp((b_total[None, :] - b_running).to(tl.float32))
    b_end = b_end * exp(b_total.to(tl.float32)) + tl.sum(b_s * b_ds, 0)
    for band in range(1 if BANDS == "one" else num_bands):
        b_up, b_down = band_factors(b_running, band, BANDS, WIDTH)
        b_ds += b_down * dot_wide(tl.trans(b_near), b_w * b_up, PRECISION)
    b_flow = -b_s * b_ds
    if VALUES:
        b_flow += tl.load(part_dg + o_hq, mask=m, other=0.0)
    b_dg = b_end[None, :] + suffix_sum(b_flow, L, PRECISION)
    if not OWN_STRENGTH:
        b_dg -= (1.0 - b_s) * b_ds
    if VALUES:
        tl.debug_barrier()  # all threads have read part_dg before it is overwritten
        tl.store(part_dg + o_hq, b_dg, mask=m)
        if OWN_STRENGTH:
            tl.store(part_ds + o_hq, b_ds, mask=m)
    else:
        b_dg += tl.load(part_dg + o_hq, mask=m, other=0.0)
        if DAMPING is not None:  # g = log sigmoid(x) / DAMPING: dg/dx = sigmoid(-x) / DAMPING
            o_g = o_t[:, None] * stride_g + i_h * M + o_m[None, :]
            b_raw = tl.load(g + o_g, mask=m, other=0.0).to(tl.float32)
            b_dg *= sigmoid(-b_raw) / DAMPING
        o_dg = o_t[:, None] * stride_dg + i_hq * M + o_m[None, :]
        tl.store(dg + o_dg, b_dg.to(dg.dtype.element_ty), mask=m)
        if OWN_STRENGTH:
            tl.store(ds + o_hq, b_ds + tl.load(part_ds + o_hq, mask=m, other=0.0), mask=m)

    tl.debug_barrier()
    b_running = load_running(p_running, o_l, m_m, length, H * M)
    b_s = tl.load(strength + o_h, mask=m, other=0.0)
    b_w = load_weights(logits, dlogits, o_hq, m, m_m, BETWEEN, VALUES)
    b_b = tl.zeros([L, L], tl.float32)
    for band in range(1 if BANDS == "one" else num_bands):
        b_up, b_down = band_factors(b_running, band, BANDS, WIDTH)
        b_b = tl.dot(b_w * b_up, tl.trans(b_down * b_s), b_b, input_precision=PRECISION)
    b_b = causal(b_b, L)
    p_square = squares + tl.program_id(0).to(tl.int64) * (L * L)
    tl.store(p_square + o_l[:, None] * L + o_l[None, :], b_b.to(INNER))
