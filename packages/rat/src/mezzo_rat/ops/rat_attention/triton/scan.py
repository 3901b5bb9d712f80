"""The recurrence inside chunks on a GPU.

The forward walks once through a chunk. The backward walks to its end and back. A program owns one
chunk of one group. Its tile is the R heads of the group by D channels of one token, so the group's
query and key are read once for all heads. The state is in registers. Chunks are independent. Each
token is loaded while the token before it is computed.
"""

import triton
import triton.language as tl

from mezzo_rat.ops.rat_attention.triton.elementwise import forget_gates


@triton.jit
def _chunk(starts, stops, i_b, i_n, T, L: tl.constexpr, MODE: tl.constexpr):
    """Return a chunk's first token, one past its last, and whether it continues a state."""
    if MODE == "packed":
        first, last = tl.load(starts + i_n).to(tl.int64), tl.load(stops + i_n).to(tl.int64)
        return first, last, first < 0
    if MODE == "continued":
        seen, added = tl.load(starts + i_b).to(tl.int64), tl.load(stops + i_b).to(tl.int64)
        begin = (seen // L + i_n) * L - seen
        return tl.maximum(begin, 0), tl.minimum(begin + L, added), begin < 0
    first = i_n.to(tl.int64) * L
    return first, tl.minimum(first + L, T), first < 0


@triton.jit
def _heads(bias, i_g, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr, BR: tl.constexpr):
    """Return the group's heads, their channels' offsets in a token, masks, and their bias."""
    o_r, o_d = tl.arange(0, BR), tl.arange(0, D)
    o_h, m_h = o_r * G + i_g, o_r < R
    o_hd, m_hd = o_h[:, None] * D + o_d[None, :], m_h[:, None] & (o_d >= 0)[None, :]
    b_bias = tl.zeros([BR, D], tl.float32)
    if bias is not None:
        b_bias += tl.load(bias + o_hd, mask=m_hd, other=0.0).to(tl.float32)
    return o_h, m_h, o_hd, m_hd, b_bias


@triton.jit
def _load(p_x, valid, o_hd, m_hd, o_gd, OV, OG, OQ, OK):
    """Load one token of a group from the projection."""
    return (
        tl.load(p_x + OG + o_hd, mask=m_hd & valid, other=0.0),
        tl.load(p_x + OV + o_hd, mask=m_hd & valid, other=0.0),
        tl.load(p_x + OK + o_gd, mask=(o_gd >= 0) & valid, other=0.0),
        tl.load(p_x + OQ + o_gd, mask=(o_gd >= 0) & valid, other=0.0),
    )


@triton.jit
def _rows(lse, delta, ds, o_row, m):
    """Load lse, delta and ds, which are one number for each token and head."""
    return (
        tl.load(lse + o_row, mask=m, other=0.0),
        tl.load(delta + o_row, mask=m, other=0.0),
        tl.load(ds + o_row, mask=m, other=0.0),
    )


@triton.jit
def _step(b_g, b_v, b_k, b_bias, b_kc, b_vc):
    """Advance k~ and v~ by one token."""
    keep, write = forget_gates(b_g, b_bias)
    b_kc = keep * b_kc + write * b_k.to(tl.float32)[None, :]
    b_vc = keep * b_vc + write * b_v.to(tl.float32)
    return b_kc, b_vc


@triton.jit(do_not_specialize=["T", "N"])
def chunk_scan_fwd_kernel(
    x, bias, k0, v0, starts, stops, v_run, k_ends, v_ends, own, k_last, v_last,
    T, N, stride_b, stride_t, scale2,
    OV: tl.constexpr, OG: tl.constexpr, OQ: tl.constexpr, OK: tl.constexpr,
    L: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BR: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Scan one chunk of one group; write v~, the end, and the base-2 logit of each own k~."""
    pid = tl.program_id(0)
    i_g, i_n, i_b = pid % G, pid // G % N, (pid // G // N).to(tl.int64)
    first, last, continues = _chunk(starts, stops, i_b, i_n, T, L, MODE)
    o_h, m_h, o_hd, m_hd, b_bias = _heads(bias, i_g, G, R, D, BR)
    o_gd = i_g * D + tl.arange(0, D)
    b_kc, b_vc = tl.zeros([BR, D], tl.float32), tl.zeros([BR, D], tl.float32)
    if MODE == "continued":
        b_kc += tl.load(k0 + i_b * G * R * D + o_hd, mask=m_hd & continues, other=0.0)
        b_vc += tl.load(v0 + i_b * G * R * D + o_hd, mask=m_hd & continues, other=0.0)
    p_x = x + i_b * stride_b + first * stride_t
    b_g, b_v, b_k, b_q = _load(p_x, first < last, o_hd, m_hd, o_gd, OV, OG, OQ, OK)
    for t in range(first, last):
        p_x += stride_t
        n_g, n_v, n_k, n_q = _load(p_x, t + 1 < last, o_hd, m_hd, o_gd, OV, OG, OQ, OK)
        b_kc, b_vc = _step(b_g, b_v, b_k, b_bias, b_kc, b_vc)
        b_own = tl.sum(b_kc * b_q.to(tl.float32)[None, :], axis=1) * scale2
        p_run = v_run + (i_b * T + t) * (G * R * D)
        # A query that sees no end outputs its own value, whatever its logit is. So add 0, or NaN if
        # the logit is not finite: the output must show it.
        b_run = b_vc + (b_own - b_own)[:, None]
        tl.store(p_run + o_hd, b_run.to(v_run.dtype.element_ty), mask=m_hd)
        tl.store(own + (i_b * G * R + o_h) * T + t, b_own, mask=m_h)
        b_g, b_v, b_k, b_q = n_g, n_v, n_k, n_q
    # A chunk without tokens gets an end of zeros, as masked ends must be finite too.
    o_end = (i_b * N + i_n) * (G * R * D) + o_hd
    # Attention multiplies the ends that a query must not see by 0, and 0 times NaN is NaN. So a
    # value that is not finite becomes 0, and its key becomes NaN instead. The NaN then reaches the
    # logits, which are masked by selection.
    b_end = b_vc.to(v_ends.dtype.element_ty).to(tl.float32)
    finite = tl.abs(b_end) < float("inf")
    tl.store(k_ends + o_end, tl.where(finite, b_kc, float("nan")), mask=m_hd)
    b_end = tl.where(finite, b_end, 0.0)
    tl.store(v_ends + o_end, b_end.to(v_ends.dtype.element_ty), mask=m_hd)
    if MODE == "continued":
        m_last = m_hd & (first < last) & (last == tl.load(stops + i_b))
        tl.store(k_last + i_b * G * R * D + o_hd, b_kc, mask=m_last)
        tl.store(v_last + i_b * G * R * D + o_hd, b_vc, mask=m_last)


@triton.jit
def _walk_there(
    b_kc, b_vc, p_x, p_dx, p_do, p_dq, lse, delta, ds_past, p_own, ds_own, o_row, first, last,
    o_hd, m_hd, m_h, o_gd, b_bias, stride_t, scale, scale2,
    OV: tl.constexpr, OG: tl.constexpr, OQ: tl.constexpr, OK: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, GD: tl.constexpr,
):  # fmt: skip
    """Scan a chunk again: finish dq, store p and ds of each own k~, and store k~, v~ in dx."""
    some, m_gd = first < last, o_gd >= 0
    b_g, b_v, b_k, b_q = _load(p_x, some, o_hd, m_hd, o_gd, OV, OG, OQ, OK)
    b_do = tl.load(p_do + o_hd, mask=m_hd & some, other=0.0)
    b_dq = tl.load(p_dq + o_gd, mask=m_gd & some, other=0.0)
    b_lse, b_delta, b_past = _rows(lse, delta, ds_past, o_row, m_h & some)
    for t in range(first, last):
        more = t + 1 < last
        p_x += stride_t
        p_do += C
        p_dq += GD
        n_g, n_v, n_k, n_q = _load(p_x, more, o_hd, m_hd, o_gd, OV, OG, OQ, OK)
        n_do = tl.load(p_do + o_hd, mask=m_hd & more, other=0.0)
        n_dq = tl.load(p_dq + o_gd, mask=m_gd & more, other=0.0)
        n_lse, n_delta, n_past = _rows(lse, delta, ds_past, o_row + 1, m_h & more)
        b_kc, b_vc = _step(b_g, b_v, b_k, b_bias, b_kc, b_vc)
        tl.store(p_dx + OG + o_hd, b_kc.to(p_dx.dtype.element_ty), mask=m_hd)
        tl.store(p_dx + OV + o_hd, b_vc.to(p_dx.dtype.element_ty), mask=m_hd)
        b_s = tl.sum(b_kc * b_q.to(tl.float32)[None, :], axis=1) * scale2
        b_p = tl.where(m_h, tl.exp2(b_s - b_lse), 0.0)
        # This is p (dp - delta). delta = dy · y contains the rounding error of y. The ds of the
        # ends contain the same error, so it cancels in this sum of both.
        b_ds = (1 - b_p) * (tl.sum(b_do.to(tl.float32) * b_vc, axis=1) - b_delta) - b_past
        b_ds *= b_p * scale
        b_dq += tl.sum(b_ds[:, None] * b_kc, axis=0)
        tl.store(p_own + o_row, b_p, mask=m_h)
        tl.store(ds_own + o_row, b_ds, mask=m_h)
        tl.store(p_dx + OQ + o_gd, b_dq.to(p_dx.dtype.element_ty))
        b_g, b_v, b_k, b_q, b_do, b_dq = n_g, n_v, n_k, n_q, n_do, n_dq
        b_lse, b_delta, b_past = n_lse, n_delta, n_past
        p_dx += W
        o_row += 1


@triton.jit
def _walk_back(
    p_x, p_dx, p_do, p_own, ds_own, o_row, first, last, b_dkc, b_dvc, b_dbias, k0, v0, o_k0,
    continues, o_hd, m_hd, m_h, o_gd, b_bias, stride_t,
    OV: tl.constexpr, OG: tl.constexpr, OQ: tl.constexpr, OK: tl.constexpr, W: tl.constexpr,
    C: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Walk from a chunk's last token to its first and compute dv, dg, dk.

    Return the gradients of k~ and v~ before the chunk's first token, and the sum of dg.
    k~ and v~ are stored where dg and dv will be. The gradients of token t need k~ and v~ of token
    t - 1, which are read before the gradients of t - 1 overwrite them.
    """
    some, more = first < last, first + 1 < last
    b_g, b_v, b_k, b_q = _load(p_x, some, o_hd, m_hd, o_gd, OV, OG, OQ, OK)
    b_do = tl.load(p_do + o_hd, mask=m_hd & some, other=0.0)
    b_kprev = tl.load(p_dx - W + OG + o_hd, mask=m_hd & more, other=0.0)
    b_vprev = tl.load(p_dx - W + OV + o_hd, mask=m_hd & more, other=0.0)
    b_p = tl.load(p_own + o_row, mask=m_h & some, other=0.0)
    b_ds = tl.load(ds_own + o_row, mask=m_h & some, other=0.0)
    for t in range(first, last):
        p_x -= stride_t
        p_do -= C
        more = t + 1 < last  # the chunk's first token comes last here; k0, v0 or zeros precede it
        even_more = t + 2 < last
        n_g, n_v, n_k, n_q = _load(p_x, more, o_hd, m_hd, o_gd, OV, OG, OQ, OK)
        n_do = tl.load(p_do + o_hd, mask=m_hd & more, other=0.0)
        n_kprev = tl.load(p_dx - 2 * W + OG + o_hd, mask=m_hd & even_more, other=0.0)
        n_vprev = tl.load(p_dx - 2 * W + OV + o_hd, mask=m_hd & even_more, other=0.0)
        n_p = tl.load(p_own + o_row - 1, mask=m_h & more, other=0.0)
        n_ds = tl.load(ds_own + o_row - 1, mask=m_h & more, other=0.0)
        if MODE == "continued":
            # Loaded here and not before the loop, which has no registers left for it.
            m_k0 = m_hd & continues & (t + 1 == last)
            b_kprev = b_kprev.to(tl.float32) + tl.load(k0 + o_k0 + o_hd, mask=m_k0, other=0.0)
            b_vprev = b_vprev.to(tl.float32) + tl.load(v0 + o_k0 + o_hd, mask=m_k0, other=0.0)
        keep, write = forget_gates(b_g, b_bias)
        b_dkc += b_ds[:, None] * b_q.to(tl.float32)[None, :]
        b_dvc += b_p[:, None] * b_do.to(tl.float32)
        b_df = b_dkc * (b_kprev.to(tl.float32) - b_k.to(tl.float32)[None, :])
        b_df += b_dvc * (b_vprev.to(tl.float32) - b_v.to(tl.float32))
        b_dg = keep * write * b_df
        b_dbias += b_dg
        b_dk = tl.sum(tl.where(m_hd, write * b_dkc, 0.0), axis=0)
        tl.debug_barrier()  # all threads have read a row before one overwrites it
        tl.store(p_dx + OG + o_hd, b_dg.to(p_dx.dtype.element_ty), mask=m_hd)
        tl.store(p_dx + OV + o_hd, (write * b_dvc).to(p_dx.dtype.element_ty), mask=m_hd)
        tl.store(p_dx + OK + o_gd, b_dk.to(p_dx.dtype.element_ty))
        b_dkc *= keep
        b_dvc *= keep
        b_g, b_v, b_k, b_q, b_do, b_p, b_ds = n_g, n_v, n_k, n_q, n_do, n_p, n_ds
        b_kprev, b_vprev = n_kprev, n_vprev
        p_dx -= W
        o_row -= 1
    return b_dkc, b_dvc, b_dbias


@triton.jit(do_not_specialize=["T", "N", "chunks", "programs"])
def chunk_scan_bwd_kernel(
    x, bias, k0, v0, starts, stops, do, lse, delta, dq_past, ds_past, dk_ends, dv_ends,
    dk_last, dv_last, p_own, ds_own, dx, dbias, dk0, dv0,
    T, N, chunks, programs, stride_b, stride_t, scale, scale2,
    OV: tl.constexpr, OG: tl.constexpr, OQ: tl.constexpr, OK: tl.constexpr, W: tl.constexpr,
    L: tl.constexpr, G: tl.constexpr, R: tl.constexpr, D: tl.constexpr,
    BR: tl.constexpr, MODE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of v, g, k and q in chunks of one group; dq of the ends is given."""
    C: tl.constexpr = G * R * D
    pid = tl.program_id(0)
    i_g = pid % G
    o_h, m_h, o_hd, m_hd, b_bias = _heads(bias, i_g, G, R, D, BR)
    o_gd = i_g * D + tl.arange(0, D)
    b_dbias = tl.zeros([BR, D], tl.float32)
    for i_c in range(pid // G, chunks, programs):
        i_n, i_b = i_c % N, (i_c // N).to(tl.int64)
        first, last, continues = _chunk(starts, stops, i_b, i_n, T, L, MODE)
        o_t = i_b * T + first
        b_kc, b_vc = tl.zeros([BR, D], tl.float32), tl.zeros([BR, D], tl.float32)
        if MODE == "continued":
            b_kc += tl.load(k0 + i_b * C + o_hd, mask=m_hd & continues, other=0.0)
            b_vc += tl.load(v0 + i_b * C + o_hd, mask=m_hd & continues, other=0.0)
        _walk_there(
            b_kc, b_vc, x + i_b * stride_b + first * stride_t, dx + o_t * W, do + o_t * C,
            dq_past + o_t * (G * D), lse, delta, ds_past, p_own, ds_own,
            (i_b * G * R + o_h) * T + first, first, last, o_hd, m_hd, m_h, o_gd, b_bias,
            stride_t, scale, scale2, OV, OG, OQ, OK, W, C, G * D,
        )  # fmt: skip
        tl.debug_barrier()  # from here on threads read what other threads have written
        o_end = (i_b * N + i_n) * C + o_hd
        b_dkc = tl.load(dk_ends + o_end, mask=m_hd, other=0.0)
        b_dvc = tl.load(dv_ends + o_end, mask=m_hd, other=0.0)
        if MODE == "continued":
            m_last = m_hd & (first < last) & (last == tl.load(stops + i_b))
            b_dkc += tl.load(dk_last + i_b * C + o_hd, mask=m_last, other=0.0)
            b_dvc += tl.load(dv_last + i_b * C + o_hd, mask=m_last, other=0.0)
        o_t = i_b * T + last - 1
        b_dkc, b_dvc, b_dbias = _walk_back(
            x + i_b * stride_b + (last - 1) * stride_t, dx + o_t * W, do + o_t * C,
            p_own, ds_own, (i_b * G * R + o_h) * T + last - 1, first, last,
            b_dkc, b_dvc, b_dbias, k0, v0, i_b * C, continues, o_hd, m_hd, m_h, o_gd, b_bias,
            stride_t, OV, OG, OQ, OK, W, C, MODE,
        )  # fmt: skip
        if MODE == "continued":
            m_first = m_hd & (i_n == 0) & (first < last)
            tl.store(dk0 + i_b * C + o_hd, tl.where(continues, b_dkc, 0.0), mask=m_first)
            tl.store(dv0 + i_b * C + o_hd, tl.where(continues, b_dvc, 0.0), mask=m_first)
    if dbias is not None:
        tl.store(dbias + (pid // G).to(tl.int64) * C + o_hd, b_dbias, mask=m_hd)
