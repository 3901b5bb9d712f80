"""Attention to the chunks' ends and to each token's own k~, v~ on a GPU, with the output gate.

As in FlashAttention, no matrix of scores is stored. Scores are in base 2. A query sees the slots
`low <= j < high`, and its own k~ starts the online softmax. The loops load their tiles by tensor
descriptors (the GPU's bulk copies) of (B, T or N, heads · D).
"""

import triton
import triton.language as tl
from mezzo_core.ops.online_softmax.triton import add_scores
from mezzo_core.ops.ptxas import require_ptxas

require_ptxas()  # every module that launches matrix products imports this one


@triton.jit
def _seen(lows, highs, starts, i_b, o_t, T, L: tl.constexpr, MODE: tl.constexpr):
    """Return the range of slots that each token sees."""
    if MODE == "packed":
        return (
            tl.load(lows + o_t, mask=o_t < T, other=0).to(tl.int32),
            tl.load(highs + o_t, mask=o_t < T, other=0).to(tl.int32),
        )
    if MODE == "continued":
        b_high = ((tl.load(starts + i_b) + o_t) // L).to(tl.int32)
    else:
        b_high = (o_t // L).to(tl.int32)
    return tl.zeros_like(b_high), b_high


@triton.jit
def _range(b_low, b_high, m_t, BN: tl.constexpr, MODE: tl.constexpr):
    """Return `begin`, `full` and `limit` of the slots that a tile of tokens sees.

    All tokens see all slots from `begin` to `full`. From `full` to `limit` a mask is needed.
    """
    begin = tl.min(tl.where(m_t, b_low, 2147483647)) // BN * BN
    limit = tl.max(tl.where(m_t, b_high, 0))
    full = begin
    if MODE != "packed":
        full = tl.min(b_high) // BN * BN
    return begin, full, limit


@triton.jit
def _attend(
    b_acc, b_m, b_l, b_q, k_ends, v_ends, i_b, i_h, j, b_low, b_high, scale2,
    D: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add BN slots to an online softmax."""
    b_k = k_ends.load([i_b, j, i_h * D]).reshape(BN, D)
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION)
    if MASK:
        o_j = j + tl.arange(0, BN)
        seen = (o_j[None, :] >= b_low[:, None]) & (o_j[None, :] < b_high[:, None])
        b_s = tl.where(seen, b_s, float("-inf"))
    b_p, b_acc, b_m, b_l = add_scores(b_acc, b_m, b_l, b_s, scale2)
    b_v = v_ends.load([i_b, j, i_h * D]).reshape(BN, D)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_m, b_l


@triton.jit(do_not_specialize=["T"])
def attend_ends_fwd_kernel(
    q, k_ends, v_ends, v_run, own, z, lows, highs, starts, y, lse,
    T, stride_zb, stride_zt, scale2,
    L: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
    MODE: tl.constexpr, HAS_Z: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM tokens of one head. The tokens that see most slots run first."""
    num_m = tl.cdiv(T, BM)
    pid = tl.program_id(0)
    i_m, i_h, i_b = num_m - 1 - pid % num_m, pid // num_m % H, pid // num_m // H
    o_t, o_d = i_m * BM + tl.arange(0, BM), tl.arange(0, D)
    m_t = o_t < T
    m = m_t[:, None]
    o_row = i_b.to(tl.int64) * T + o_t
    b_low, b_high = _seen(lows, highs, starts, i_b, o_t, T, L, MODE)
    b_q = tl.load(q + (o_row[:, None] * G + i_h % G) * D + o_d[None, :], mask=m, other=0.0)
    o_out = (o_row[:, None] * H + i_h) * D + o_d[None, :]
    b_acc = tl.load(v_run + o_out, mask=m, other=0.0).to(tl.float32)
    p_row = (i_b.to(tl.int64) * H + i_h) * T + o_t
    b_m = tl.load(own + p_row, mask=m_t, other=0.0)
    b_l = tl.full([BM], 1.0, tl.float32)
    if HAS_Z:  # loaded early, so that the end need not wait for it
        p_z = z + i_b.to(tl.int64) * stride_zb + o_t.to(tl.int64)[:, None] * stride_zt
        b_z = tl.load(p_z + i_h * D + o_d[None, :], mask=m, other=0.0)
    begin, full, limit = _range(b_low, b_high, m_t, BN, MODE)
    for j in range(begin, full, BN):
        b_acc, b_m, b_l = _attend(
            b_acc, b_m, b_l, b_q, k_ends, v_ends, i_b, i_h, j, b_low, b_high, scale2,
            D, BN, False, PRECISION,
        )  # fmt: skip
    for j in range(full, limit, BN):
        b_acc, b_m, b_l = _attend(
            b_acc, b_m, b_l, b_q, k_ends, v_ends, i_b, i_h, j, b_low, b_high, scale2,
            D, BN, True, PRECISION,
        )  # fmt: skip
    b_y = b_acc / b_l[:, None]
    if HAS_Z:
        b_y *= tl.sigmoid(b_z.to(tl.float32))
    tl.store(y + o_out, b_y.to(y.dtype.element_ty), mask=m)
    tl.store(lse + p_row, b_m + tl.log2(b_l), mask=m_t)


@triton.jit
def _softmax_bwd(
    b_q, b_k, b_v, b_do, b_lse, b_delta, o_j, b_low, b_high, scale2,
    MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return p and ds of a tile of tokens by slots; ds without the scale."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
    b_p = tl.exp2(b_s - b_lse[:, None])
    if MASK:
        seen = (o_j[None, :] >= b_low[:, None]) & (o_j[None, :] < b_high[:, None])
        b_p = tl.where(seen, b_p, 0.0)
    b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
    return b_p, b_p * (b_dp - b_delta[:, None])


@triton.jit
def _add_dq(
    b_dq, b_past, b_q, b_do, b_lse, b_delta, k_ends, v_ends, i_b, i_h, j, b_low, b_high, scale2,
    D: tl.constexpr, BN: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of BN slots of one head to dq (without the scale), and their ds."""
    b_k = k_ends.load([i_b, j, i_h * D]).reshape(BN, D)
    b_v = v_ends.load([i_b, j, i_h * D]).reshape(BN, D)
    o_j = j + tl.arange(0, BN)
    _p, b_ds = _softmax_bwd(
        b_q, b_k, b_v, b_do, b_lse, b_delta, o_j, b_low, b_high, scale2, MASK, PRECISION
    )
    b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    return b_dq, b_past + tl.sum(b_ds, 1)


@triton.jit(do_not_specialize=["T"])
def attend_ends_dq_kernel(
    q, k_ends, v_ends, do, lse, delta, lows, highs, starts, dq, ds_past, T, scale, scale2,
    L: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dq of BM tokens of a group over the group's heads, and ds of each head over its slots."""
    num_m = tl.cdiv(T, BM)
    pid = tl.program_id(0)
    i_m, i_g, i_b = num_m - 1 - pid % num_m, pid // num_m % G, pid // num_m // G
    o_t, o_d = i_m * BM + tl.arange(0, BM), tl.arange(0, D)
    m_t = o_t < T
    m = m_t[:, None]
    o_row = i_b.to(tl.int64) * T + o_t
    b_low, b_high = _seen(lows, highs, starts, i_b, o_t, T, L, MODE)
    begin, full, limit = _range(b_low, b_high, m_t, BN, MODE)
    o_q = (o_row[:, None] * G + i_g) * D + o_d[None, :]
    b_q = tl.load(q + o_q, mask=m, other=0.0)
    b_dq = tl.zeros([BM, D], tl.float32)
    for i_h in range(i_g, H, G):
        p_do = do + (o_row[:, None] * H + i_h) * D + o_d[None, :]
        b_do = tl.load(p_do, mask=m, other=0.0)
        p_row = (i_b.to(tl.int64) * H + i_h) * T + o_t
        b_lse = tl.load(lse + p_row, mask=m_t, other=0.0)
        b_delta = tl.load(delta + p_row, mask=m_t, other=0.0)
        b_past = tl.zeros([BM], tl.float32)
        for j in range(begin, full, BN):
            b_dq, b_past = _add_dq(
                b_dq, b_past, b_q, b_do, b_lse, b_delta, k_ends, v_ends, i_b, i_h, j, b_low, b_high,
                scale2, D, BN, False, PRECISION,
            )  # fmt: skip
        for j in range(full, limit, BN):
            b_dq, b_past = _add_dq(
                b_dq, b_past, b_q, b_do, b_lse, b_delta, k_ends, v_ends, i_b, i_h, j, b_low, b_high,
                scale2, D, BN, True, PRECISION,
            )  # fmt: skip
        tl.store(ds_past + p_row, b_past, mask=m_t)
    tl.store(dq + o_q, b_dq * scale, mask=m)


@triton.jit
def _add_dkv(
    b_dk, b_dv, b_k, b_v, q, do, lse, delta, i_b, i_h, t, o_j, lows, highs, starts, T, scale2,
    L: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, MASK: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of BM tokens to dk (without the scale) and to dv."""
    o_t = t + tl.arange(0, BM)
    b_q = q.load([i_b, t, (i_h % G) * D]).reshape(BM, D)
    b_do = do.load([i_b, t, i_h * D]).reshape(BM, D)
    p_row = (i_b.to(tl.int64) * H + i_h) * T + o_t
    b_lse = tl.load(lse + p_row, mask=o_t < T, other=float("inf"))
    b_delta = tl.load(delta + p_row, mask=o_t < T, other=0.0)
    b_low, b_high = _seen(lows, highs, starts, i_b, o_t, T, L, MODE)
    b_p, b_ds = _softmax_bwd(
        b_q, b_k, b_v, b_do, b_lse, b_delta, o_j, b_low, b_high, scale2, MASK, PRECISION
    )
    # The tiles are tokens by slots, and are transposed for the products. As slots by tokens, lse
    # and delta would lie along the columns, and there are not enough registers for that.
    b_dv = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, b_dv, input_precision=PRECISION)
    b_dk = tl.dot(tl.trans(b_ds.to(b_q.dtype)), b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit(do_not_specialize=["T", "N"])
def attend_ends_dkv_kernel(
    q, k_ends, v_ends, do, lse, delta, lows, highs, starts, stops, unseen, dk, dv,
    T, N, scale, scale2,
    L: tl.constexpr, G: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, MODE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BN ends of one head, over all tokens that see them."""
    num_n = tl.cdiv(N, BN)
    pid = tl.program_id(0)
    i_n, i_h, i_b = pid % num_n, pid // num_n % H, pid // num_n // H
    o_j, o_d = i_n * BN + tl.arange(0, BN), tl.arange(0, D)
    m_j = (o_j < N)[:, None]
    o_end = ((i_b.to(tl.int64) * N + o_j[:, None]) * H + i_h) * D + o_d[None, :]
    b_k = tl.load(k_ends + o_end, mask=m_j, other=0.0)
    b_v = tl.load(v_ends + o_end, mask=m_j, other=0.0)
    b_dk, b_dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
    if MODE == "packed":
        begin = tl.load(stops + i_n * BN).to(tl.int32) // BM * BM
        end = tl.load(unseen + tl.minimum(i_n * BN + BN, N) - 1).to(tl.int32)
        full = end
    elif MODE == "continued":
        seen = tl.load(starts + i_b)
        first = tl.maximum((i_n * BN + 1).to(tl.int64) * L - seen, 0)
        seen_by_all = tl.maximum((i_n * BN + BN).to(tl.int64) * L - seen, 0)
        begin, end = tl.minimum(first, T).to(tl.int32) // BM * BM, T
        full = begin + tl.cdiv(tl.minimum(seen_by_all, T).to(tl.int32) - begin, BM) * BM
        full = tl.minimum(full, T)
    else:
        begin, end = (i_n * BN + 1) * L // BM * BM, T
        # In 64 bits: the end of BN long chunks would wrap in 32, and the mask would be missing.
        seen_by_all = (i_n * BN + BN).to(tl.int64) * L
        full = begin + tl.cdiv(seen_by_all - begin, BM) * BM
        full = tl.minimum(full, T).to(tl.int32)
    for t in range(begin, full, BM):
        b_dk, b_dv = _add_dkv(
            b_dk, b_dv, b_k, b_v, q, do, lse, delta, i_b, i_h, t, o_j, lows, highs, starts, T,
            scale2, L, G, H, D, BM, True, MODE, PRECISION,
        )  # fmt: skip
    for t in range(full, end, BM):
        b_dk, b_dv = _add_dkv(
            b_dk, b_dv, b_k, b_v, q, do, lse, delta, i_b, i_h, t, o_j, lows, highs, starts, T,
            scale2, L, G, H, D, BM, False, MODE, PRECISION,
        )  # fmt: skip
    tl.store(dk + o_end, b_dk * scale, mask=m_j)
    tl.store(dv + o_end, b_dv, mask=m_j)
