"""The gated scan on a GPU: bound by reading z, v, g and writing the output.

A program owns BD channels (one warp, 8 bytes a lane) of a span of tokens and walks through time,
the state in registers. It loads BT tokens before it uses the first, so that many loads are under
way, and then steps through them. When rows and channels alone give too few programs, time is split:
a first pass finds what each span does to a state (multiplies it by the product of its gates, adds
its own end), a small one chains the spans, and the main pass starts each span from its true state.

The backward keeps no h. It has the float32 states of every EVERY-th token, scans forward between
two of them in registers, and then walks back. Nothing is added atomically: repeats are bit-equal.

Packed sequences lie in the one row: at a token that opens sequence s the state becomes h0[s]; at
one that closes it the gradient of the state becomes dfinal[s].
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

# Time is split below ENOUGH programs (8 warps an SM), then into about WANTED: several waves.
ENOUGH, WANTED = 1024, 4096
# Tokens in a span at least (a launch must pay), and spans at most (they are chained in sequence).
SHORTEST, MOST = 128, 512
# Tokens that the forward loads at once; a multiple of the EVERY of the kept states.
TILE = 16
# Of a thread in the backward: 12 warps fit on an SM, where the compiler's own choice lets 8.
REGISTERS = 168
# The logits as which a token that is not real is read: it keeps the state and writes nothing, and
# nothing comes out.
KEEP, SHUT = tl.constexpr(float("inf")), tl.constexpr(float("-inf"))


@triton.jit
def _sigmoid(b_e):
    """Return 1 / (1 + e) by rsqrt: a division is several instructions more."""
    b_r = tl.rsqrt(1.0 + b_e)
    return b_r * b_r


@triton.jit
def _sigmoids(b_e):
    """Return sigmoid(x) and sigmoid(-x) from e = exp(-x).

    The smaller one is as precise as e, and the larger one is 1 minus it: a gate near one, which is
    raised to the power of thousands of tokens, is rounded once. Exact for e = inf; NaN stays NaN.
    """
    b_s = _sigmoid(b_e)
    b_n = b_e * b_s
    return tl.where(b_e < 1.0, 1.0 - b_n, b_s), tl.where(b_e < 1.0, b_n, 1.0 - b_s)


@triton.jit
def _exp_minus(b_x, b_shift):
    """Return exp(-x) 2**shift."""
    return tl.exp2(b_x.to(tl.float32) * -1.4426950408889634 + b_shift)


@triton.jit
def _place(T, num_spans, span, C: tl.constexpr, BD: tl.constexpr):
    """Say what this program owns: its row, span and channels, and the borders of the span."""
    pid = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = tl.cdiv(C, BD)
    i_d, i_n, i_b = pid % ND, pid // ND % num_spans, pid // ND // num_spans
    start = i_n * span
    return i_b, i_n, i_d * BD + tl.arange(0, BD), start, tl.minimum(start + span, T)


@triton.jit
def _num_real(lengths, i_b, end):
    """Return where the real tokens of a span end, the rest being padding."""
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + i_b))
    return end


@triton.jit
def _shift(bias, o_d, C: tl.constexpr, BD: tl.constexpr):
    """Return the shift of _exp_minus that adds the bias to the logits.

    It is finite even for a bias of -inf, so that a logit of +inf, as which a token that is not real
    is read, keeps everything whatever the bias.
    """
    b_shift = tl.zeros([BD], tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=o_d < C, other=0.0)
        b_shift += tl.where(b_bias < -1e38, -1e38, b_bias) * -1.4426950408889634
    return b_shift


@triton.jit
def _rows(p_first, stride, t, end, m_d, other: tl.constexpr, BT: tl.constexpr):
    """Load the rows of BT tokens from t on, all under way at once; `other` from `end` on."""
    rows = ()
    for i in tl.static_range(BT):
        rows += (tl.load(p_first + i * stride, mask=m_d & (t + i < end), other=other),)  # type: ignore[assignment]
    return rows


@triton.jit
def _border(owners, states, t, end, b_state, o_d, C: tl.constexpr):
    """Return the sequence with a border at token t, or -1, and the state, replaced if there is."""
    i_s = tl.load(owners + t, mask=t < end, other=-1).to(tl.int64)
    b_new = tl.load(states + i_s * C + o_d, mask=(o_d < C) & (i_s >= 0), other=0.0)
    return i_s, tl.where(i_s >= 0, b_new, b_state)


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def gated_scan_fwd_kernel_span(
    zvg, bias, lengths, h0, opens, product, local, T, num_spans, span, stride_b, stride_t,
    C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Find the product of a span's gates and its end from a zero state.

    Where a sequence opens inside, the end depends on no state before: the product is then -1.
    """
    i_b, i_n, o_d, start, end = _place(T, num_spans, span, C, BD)
    end = tl.where(i_n + 1 < num_spans, end, start)  # nothing follows the last span
    real_end = _num_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = _shift(bias, o_d, C, BD)
    b_p, b_h = tl.full([BD], 1.0, tl.float32), tl.zeros([BD], tl.float32)
    for i_t in range(tl.cdiv(end - start, BT)):
        t_0 = start + i_t * BT
        p_z = zvg + i_b * stride_b + t_0 * stride_t + o_d
        b_v = _rows(p_z + C, stride_t, t_0, real_end, m_d, 0.0, BT)
        b_g = _rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        for i in tl.static_range(BT):
            if opens is not None:
                i_s, b_h = _border(opens, h0, t_0 + i, end, b_h, o_d, C)
                b_p = tl.where(i_s >= 0, -1.0, b_p)
            b_f, b_w = _sigmoids(_exp_minus(b_g[i], b_shift))
            b_h = b_f * b_h + b_w * b_v[i].to(tl.float32)
            b_p = b_p * b_f if opens is None else tl.where(b_p < 0, b_p, b_p * b_f)
    o_n = (i_b * num_spans + i_n) * C + o_d
    tl.store(product + o_n, b_p, mask=m_d)
    tl.store(local + o_n, b_h, mask=m_d)


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def gated_scan_bwd_kernel_span(
    dout, dfinal, zvg, bias, lengths, closes, product, local, T, num_spans, span,
    stride_db, stride_dt, stride_b, stride_t,
    C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Find the product of a span's gates and the gradient of its first state, none coming in.

    As in the forward, but from the end: spans are numbered from the last one.
    """
    i_b, i_n, o_d, start, end = _place(T, num_spans, span, C, BD)
    end = tl.where(i_n > 0, end, start)  # nothing precedes the first span
    real_end = _num_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = _shift(bias, o_d, C, BD)
    b_p, b_dh = tl.full([BD], 1.0, tl.float32), tl.zeros([BD], tl.float32)
    num_tiles = tl.cdiv(end - start, BT)
    for i_t in range(num_tiles):
        t_0 = start + (num_tiles - 1 - i_t) * BT
        p_z = zvg + i_b * stride_b + t_0 * stride_t + o_d
        p_do = dout + i_b * stride_db + t_0 * stride_dt + o_d
        b_z = _rows(p_z, stride_t, t_0, real_end, m_d, SHUT, BT)
        b_g = _rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        b_do = _rows(p_do, stride_dt, t_0, end, m_d, 0.0, BT)
        for i in tl.static_range(BT - 1, -1, -1):
            if closes is not None:
                i_s, b_dh = _border(closes, dfinal, t_0 + i, end, b_dh, o_d, C)
                b_p = tl.where(i_s >= 0, -1.0, b_p)
            b_f, _ = _sigmoids(_exp_minus(b_g[i], b_shift))
            b_s = _sigmoid(_exp_minus(b_z[i], 0.0))
            b_dh = b_f * (b_do[i].to(tl.float32) * b_s + b_dh)
            b_p = b_p * b_f if closes is None else tl.where(b_p < 0, b_p, b_p * b_f)
    o_n = (i_b * num_spans + num_spans - 1 - i_n) * C + o_d
    tl.store(product + o_n, b_p, mask=m_d)
    tl.store(local + o_n, b_dh, mask=m_d)


@triton.jit(do_not_specialize=["num_spans"])
def gated_scan_kernel_carry(
    product, local, first, carry, num_spans, C: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr
):
    """Chain the spans of one row: what enters each of them, given what enters the first."""
    i_b, _, o_d, _, _ = _place(1, 1, 1, C, BD)
    m_d = o_d < C
    b_c = tl.load(first + i_b * C + o_d, mask=m_d, other=0.0)
    for i_t in range(tl.cdiv(num_spans, BN)):
        n_0 = i_t * BN
        o_n = (i_b * num_spans + n_0) * C + o_d
        b_p = _rows(product + o_n, C, n_0, num_spans, m_d, 0.0, BN)
        b_l = _rows(local + o_n, C, n_0, num_spans, m_d, 0.0, BN)
        for i in tl.static_range(BN):
            tl.store(carry + o_n + i * C, b_c, mask=m_d & (n_0 + i < num_spans))
            b_c = tl.where(b_p[i] < 0, b_l[i], b_p[i] * b_c + b_l[i])


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def gated_scan_fwd_kernel(
    zvg, bias, lengths, h0, opens, closes, carry, out, final, kept, T, num_spans, span,
    stride_b, stride_t,
    C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Scan BD channels of one span forward from the state that enters it."""
    i_b, i_n, o_d, start, end = _place(T, num_spans, span, C, BD)
    real_end = _num_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = _shift(bias, o_d, C, BD)
    b_h = tl.load(carry + (i_b * num_spans + i_n) * C + o_d, mask=m_d, other=0.0)
    for i_t in range(tl.cdiv(end - start, BT)):
        t_0 = start + i_t * BT
        p_z = zvg + i_b * stride_b + t_0 * stride_t + o_d
        b_g = _rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        b_v = _rows(p_z + C, stride_t, t_0, real_end, m_d, 0.0, BT)
        b_z = _rows(p_z, stride_t, t_0, real_end, m_d, SHUT, BT)
        if EVERY > 0:
            p_kept = kept + (i_b * tl.cdiv(T, EVERY) + t_0 // EVERY) * C + o_d
        for i in tl.static_range(BT):
            t = t_0 + i
            m = m_d & (t < end)
            if EVERY > 0 and i % EVERY == 0:
                tl.store(p_kept + i // EVERY * C, b_h, mask=m)
            if opens is not None:
                _, b_h = _border(opens, h0, t, end, b_h, o_d, C)
            b_f, b_w = _sigmoids(_exp_minus(b_g[i], b_shift))
            b_h = b_f * b_h + b_w * b_v[i].to(tl.float32)
            b_out = _sigmoid(_exp_minus(b_z[i], 0.0)) * b_h
            tl.store(out + (i_b * T + t) * C + o_d, b_out.to(out.dtype.element_ty), mask=m)
            if closes is not None:
                i_s = tl.load(closes + t, mask=t < end, other=-1).to(tl.int64)
                tl.store(final + i_s * C + o_d, b_h, mask=m & (i_s >= 0))
    if closes is None:
        tl.store(final + i_b * C + o_d, b_h, mask=m_d & (end == T))


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def gated_scan_bwd_kernel(
    dout, dfinal, zvg, bias, lengths, h0, opens, closes, kept, carry, dzvg, dbias, dh0,
    T, num_spans, span, stride_db, stride_dt, stride_b, stride_t,
    C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Pull the gradients of BD channels of one span back, from its end to its start."""
    i_b, i_n, o_d, start, end = _place(T, num_spans, span, C, BD)
    real_end = _num_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = _shift(bias, o_d, C, BD)
    b_db = tl.zeros([BD], tl.float32)
    o_c = (i_b * num_spans + num_spans - 1 - i_n) * C + o_d
    b_dh = tl.load(carry + o_c, mask=m_d, other=0.0)
    num_tiles = tl.cdiv(end - start, BT)
    for i_t in range(num_tiles):
        t_0 = start + (num_tiles - 1 - i_t) * BT
        p_z = zvg + i_b * stride_b + t_0 * stride_t + o_d
        p_do = dout + i_b * stride_db + t_0 * stride_dt + o_d
        p_kept = kept + (i_b * tl.cdiv(T, BT) + t_0 // BT) * C + o_d
        b_h = tl.load(p_kept, mask=m_d, other=0.0)
        b_g = _rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        b_v = _rows(p_z + C, stride_t, t_0, real_end, m_d, 0.0, BT)
        b_z = _rows(p_z, stride_t, t_0, real_end, m_d, SHUT, BT)
        b_do = _rows(p_do, stride_dt, t_0, end, m_d, 0.0, BT)
        # Forward: dz, and what the walk back multiplies: dh += d, dv = w dh, dg = m dh, dh *= f.
        steps = ()
        for i in tl.static_range(BT):
            t = t_0 + i
            if opens is not None:
                _, b_h = _border(opens, h0, t, end, b_h, o_d, C)
            b_f, b_w = _sigmoids(_exp_minus(b_g[i], b_shift))
            b_s, b_not_s = _sigmoids(_exp_minus(b_z[i], 0.0))
            b_x, b_d = b_v[i].to(tl.float32), b_do[i].to(tl.float32) * b_s
            # From h[t-1] - v[t], as h[t] - v[t] would lose its digits to a small gate.
            b_m = b_f * b_w * (b_h - b_x)
            b_h = b_f * b_h + b_w * b_x
            b_dz = b_d * b_not_s * b_h
            p_dz = dzvg + (i_b * T + t) * 3 * C + o_d
            tl.store(p_dz, b_dz.to(dzvg.dtype.element_ty), mask=m_d & (t < end))
            steps += ((b_d, b_f, b_w, b_m),)  # type: ignore[assignment]
        for i in tl.static_range(BT - 1, -1, -1):
            t = t_0 + i
            m = m_d & (t < end)
            if closes is not None:
                _, b_dh = _border(closes, dfinal, t, end, b_dh, o_d, C)
            b_d, b_f, b_w, b_m = steps[i]
            b_dh += b_d
            b_dg = b_m * b_dh
            p_dv = dzvg + ((i_b * T + t) * 3 + 1) * C + o_d
            tl.store(p_dv, (b_w * b_dh).to(dzvg.dtype.element_ty), mask=m)
            tl.store(p_dv + C, b_dg.to(dzvg.dtype.element_ty), mask=m)
            b_db += b_dg
            b_dh = b_f * b_dh
            if opens is not None:
                i_s = tl.load(opens + t, mask=t < end, other=-1).to(tl.int64)
                tl.store(dh0 + i_s * C + o_d, b_dh, mask=m & (i_s >= 0))
    tl.store(dbias + (i_b * num_spans + i_n) * C + o_d, b_db, mask=m_d)
    if opens is None:
        tl.store(dh0 + i_b * C + o_d, b_dh, mask=m_d & (i_n == 0))


def gated_scan_fwd(
    zvg: Tensor,
    gate_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    every: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Scan forward.

    Args:
        zvg: (B, T, 3C).
        gate_bias: (C,) float32, or None.
        initial_state: (B, C), or (S, C) when packed, float32; None for zeros.
        cu_seqlens: (S + 1,) borders of packed sequences, or None.
        lengths: (B,) real tokens of each row, or None.
        every: keep the states before tokens 0, every, 2 every, ... for the backward; 0 keeps none.

    Returns:
        out (B, T, C) in zvg's dtype, the last states, and the kept ones (B, N, C), float32.
    """
    (B, T), C = zvg.shape[:2], zvg.shape[2] // 3
    zvg, gate_bias, lengths = _channels_last(zvg), _contiguous(gate_bias), _contiguous(lengths)
    h0 = _states(initial_state, zvg, cu_seqlens)
    final = h0.clone()
    out = torch.empty((B, T, C), dtype=zvg.dtype, device=zvg.device)
    num_kept = triton.cdiv(T, every) if every else 0
    kept = torch.empty((B, num_kept, C), dtype=torch.float32, device=zvg.device)
    if out.numel() == 0:
        return out, final, kept
    opens, closes = _owners(cu_seqlens, T)
    grid, plan = _plan(zvg)
    settings = {"stride_b": zvg.stride(0), "stride_t": zvg.stride(1), "BT": TILE, **plan}
    with torch.cuda.device_of(zvg):
        carry = h0
        if plan["num_spans"] > 1:
            product, local = _spans(zvg, plan)
            gated_scan_fwd_kernel_span[grid](
                zvg, gate_bias, lengths, h0, opens, product, local, **settings
            )
            carry = _chain(product, local, h0, plan)
        gated_scan_fwd_kernel[grid](
            zvg, gate_bias, lengths, h0, opens, closes, carry, out, final, kept,
            EVERY=every, **settings,
        )  # fmt: skip
    return out, final, kept


def gated_scan_bwd(
    dout: Tensor,
    dfinal: Tensor | None,
    zvg: Tensor,
    gate_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    kept: Tensor,
    every: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Pull the gradients of `out` and of the last states (None: zero) back.

    The other arguments are those of `gated_scan_fwd`, and the states that it kept.

    Returns:
        dzvg (B, T, 3C) in zvg's dtype, and, both float32, dbias (C,) and dh0, (B, C) or (S, C).
    """
    (B, T), C = zvg.shape[:2], zvg.shape[2] // 3
    zvg, dout = _channels_last(zvg), _channels_last(dout)
    gate_bias, lengths = _contiguous(gate_bias), _contiguous(lengths)
    h0, dfinal = _states(initial_state, zvg, cu_seqlens), _states(dfinal, zvg, cu_seqlens)
    dh0 = dfinal.clone()
    dzvg = torch.empty(zvg.shape, dtype=zvg.dtype, device=zvg.device)
    if zvg.numel() == 0:
        return dzvg, torch.zeros(C, dtype=torch.float32, device=zvg.device), dh0
    opens, closes = _owners(cu_seqlens, T)
    grid, plan = _plan(zvg)
    dbias = torch.empty((B * plan["num_spans"], C), dtype=torch.float32, device=zvg.device)
    settings = {
        "stride_db": dout.stride(0), "stride_dt": dout.stride(1),
        "stride_b": zvg.stride(0), "stride_t": zvg.stride(1), "BT": every, **plan,
    }  # fmt: skip
    with torch.cuda.device_of(zvg):
        carry = dfinal
        if plan["num_spans"] > 1:
            product, local = _spans(zvg, plan)
            gated_scan_bwd_kernel_span[grid](
                dout, dfinal, zvg, gate_bias, lengths, closes, product, local, **settings
            )
            carry = _chain(product, local, dfinal, plan)
        gated_scan_bwd_kernel[grid](
            dout, dfinal, zvg, gate_bias, lengths, h0, opens, closes, kept, carry,
            dzvg, dbias, dh0, maxnreg=REGISTERS, **settings,
        )  # fmt: skip
    return dzvg, dbias.sum(0), dh0


def _channels_last(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _contiguous(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _states(given: Tensor | None, zvg: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    """Return the states, zeros if none are given, one a row or one a packed sequence."""
    if given is not None:
        return given.contiguous()
    num_states = zvg.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return torch.zeros((num_states, zvg.shape[2] // 3), dtype=torch.float32, device=zvg.device)


def _owners(cu_seqlens: Tensor | None, T: int) -> tuple[Tensor | None, Tensor | None]:
    """Say for each token which sequence opens at it, and which closes after it; -1 for none."""
    if cu_seqlens is None:
        return None, None
    starts, ends = cu_seqlens[:-1].long(), cu_seqlens[1:].long()
    sequences = torch.arange(len(starts), dtype=torch.int32, device=cu_seqlens.device)
    # Sequences without tokens all go to a place past the end, where nobody looks.
    none = torch.full((T + 1,), -1, dtype=torch.int32, device=cu_seqlens.device)
    opens = none.scatter(0, torch.where(starts < ends, starts, T), sequences)
    closes = none.scatter(0, torch.where(starts < ends, ends - 1, T), sequences)
    return opens, closes


def _plan(zvg: Tensor) -> tuple[tuple[int], dict]:
    """Choose the channels of a program and how to split time, from the shapes alone."""
    (B, T), C = zvg.shape[:2], zvg.shape[2] // 3
    BD = min(triton.next_power_of_2(C), 32 * 8 // zvg.element_size())
    programs = B * triton.cdiv(C, BD)
    num_spans = 1
    if programs < ENOUGH:
        num_spans = min(triton.cdiv(WANTED, programs), triton.cdiv(T, SHORTEST), MOST)
    span = triton.cdiv(triton.cdiv(T, num_spans), TILE) * TILE
    num_spans = triton.cdiv(T, span)
    plan = {"T": T, "num_spans": num_spans, "span": span, "C": C, "BD": BD, "num_warps": 1}
    return (programs * num_spans,), plan


def _spans(zvg: Tensor, plan: dict) -> tuple[Tensor, Tensor]:
    """Allocate a product of gates and a local result for every span."""
    shape = (zvg.shape[0], plan["num_spans"], plan["C"])
    product = torch.empty(shape, dtype=torch.float32, device=zvg.device)
    return product, torch.empty_like(product)


def _chain(product: Tensor, local: Tensor, first: Tensor, plan: dict) -> Tensor:
    """Return what enters each span, (B, num_spans, C)."""
    carry = torch.empty_like(product)
    grid = (product.shape[0] * triton.cdiv(plan["C"], plan["BD"]),)
    gated_scan_kernel_carry[grid](
        product, local, first, carry, plan["num_spans"],
        C=plan["C"], BD=plan["BD"], BN=TILE, num_warps=1,
    )  # fmt: skip
    return carry
