"""The linear scan on a GPU: one pass over memory forward, one backward.

A program owns BD channels of one row, of one packed sequence, or of a span of whole chunks, which
are independent of each other. It walks through time in tiles of BT tokens and holds the state in
registers. Chunk starts and initial states are applied while a tile is read, so they cost no memory
traffic. A program has one warp, whose lanes cover the channels. So each thread has all tokens of
its channels, and scanning a tile needs no shuffle.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_core.ops.launch import launch
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.sizes import ceil_div, next_power_of_2

# A span has about this many tokens: enough to be worth starting a program.
SPAN = 256


@triton.jit
def combine(a_left, h_left, a_right, h_right):
    """Compose two steps h -> a h + x, the left one first, for `tl.associative_scan`."""
    return a_left * a_right, h_left * a_right + h_right


@triton.jit
def _place(cu_seqlens, T, num_spans, span, ND: tl.constexpr, PACKED: tl.constexpr):
    """Return what this program owns: channel tile, rows of states and tensors, sequence, span."""
    pid = tl.program_id(0).to(tl.int64)
    i_d, i_span, i_row = pid % ND, pid // ND % num_spans, pid // ND // num_spans
    if PACKED:
        i_b = i_row * 0
        # On a GPU nobody has checked the borders: no sequence may lie beyond the row.
        bos = tl.maximum(tl.load(cu_seqlens + i_row).to(tl.int64), 0)
        eos = tl.minimum(tl.load(cu_seqlens + i_row + 1).to(tl.int64), T)
    else:
        i_b = i_row
        bos = i_row * 0
        eos = bos + T
    start = bos + i_span * span
    return i_d, i_row, i_b, bos, eos, start, tl.minimum(start + span, eos)


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def linear_scan_fwd_kernel(
    a, x, h0, cu_seqlens, out, final, T, num_spans, span,
    stride_ab, stride_at, stride_xb, stride_xt,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr,
    L: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Scan BD channels of one span forward."""
    i_d, i_row, i_b, bos, eos, start, end = _place(
        cu_seqlens, T, num_spans, span, tl.cdiv(D, BD), PACKED
    )
    o_i = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D

    b_state = tl.zeros([BD], ACC)
    if HAS_STATE:
        b_state += tl.load(h0 + i_row * D + o_d, mask=m_d & (start == bos), other=0.0)
    for i_t in range(tl.cdiv(end - start, BT)):
        o_t = start + i_t * BT + o_i
        m = (o_t < end)[:, None] & m_d[None, :]
        p_a = a + i_b * stride_ab + o_t[:, None] * stride_at + o_d[None, :]
        p_x = x + i_b * stride_xb + o_t[:, None] * stride_xt + o_d[None, :]
        # Past the end the state passes through unchanged: a = 1, x = 0.
        b_a = tl.load(p_a, mask=m, other=1.0).to(ACC)
        b_x = tl.load(p_x, mask=m, other=0.0).to(ACC)
        if L > 0:
            fresh = ((o_t - bos).to(tl.int32) % L == 0) & (o_t > bos) & (o_t < end)
            b_a = tl.where(fresh[:, None], 0.0, b_a)
        b_x += tl.where((o_i == 0)[:, None], b_a * b_state[None, :], 0.0)
        _, b_h = tl.associative_scan((b_a, b_x), 0, combine)
        p_out = out + (i_b * T + o_t[:, None]) * D + o_d[None, :]
        tl.store(p_out, b_h.to(out.dtype.element_ty), mask=m)
        b_state = tl.sum(tl.where((o_i == BT - 1)[:, None], b_h, 0.0), axis=0)
    tl.store(final + i_row * D + o_d, b_state, mask=m_d & (end == eos))


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def linear_scan_bwd_kernel(
    dout, dfinal, a, out, h0, cu_seqlens, da, dx, dh0, T, num_spans, span,
    stride_db, stride_dt, stride_ab, stride_at,
    D: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr, ACC: tl.constexpr,
    L: tl.constexpr, PACKED: tl.constexpr, HAS_STATE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BD channels of one span, from its end to its start."""
    i_d, i_row, i_b, bos, eos, start, end = _place(
        cu_seqlens, T, num_spans, span, tl.cdiv(D, BD), PACKED
    )
    o_i = tl.arange(0, BT)
    o_d = i_d * BD + tl.arange(0, BD)
    m_d = o_d < D

    b_h0 = tl.zeros([BD], ACC)
    if HAS_STATE:
        b_h0 += tl.load(h0 + i_row * D + o_d, mask=m_d, other=0.0)
    b_dstate = tl.load(dfinal + i_row * D + o_d, mask=m_d & (end == eos), other=0.0).to(ACC)
    for i_t in range(tl.cdiv(end - start, BT)):
        # The rows of a tile are loaded in reverse order of time. So the backward recurrence is a
        # forward scan of the tile.
        o_t = end - 1 - i_t * BT - o_i
        m = (o_t >= start)[:, None] & m_d[None, :]
        p_dout = dout + i_b * stride_db + o_t[:, None] * stride_dt + o_d[None, :]
        p_next = a + i_b * stride_ab + (o_t[:, None] + 1) * stride_at + o_d[None, :]
        o_out = (i_b * T + o_t[:, None]) * D + o_d[None, :]
        # Beyond either end of the span a[t+1] counts as 1, which leaves the gradient unchanged.
        b_next = tl.load(p_next, mask=m & (o_t + 1 < end)[:, None], other=1.0).to(ACC)
        b_dout = tl.load(p_dout, mask=m, other=0.0).to(ACC)
        b_prev = tl.load(out + o_out - D, mask=m & (o_t > start)[:, None], other=0.0).to(ACC)
        if HAS_STATE:
            b_prev = tl.where((o_t == bos)[:, None], b_h0[None, :], b_prev)
        if L > 0:
            place = (o_t - bos).to(tl.int32) % L
            last = (place == L - 1) & (o_t >= start) & (o_t + 1 < end)
            fresh = (place == 0) & (o_t > bos)
            b_next = tl.where(last[:, None], 0.0, b_next)
            b_prev = tl.where(fresh[:, None], 0.0, b_prev)
        b_dout += tl.where((o_i == 0)[:, None], b_next * b_dstate[None, :], 0.0)
        _, b_dx = tl.associative_scan((b_next, b_dout), 0, combine)
        tl.store(dx + o_out, b_dx.to(dx.dtype.element_ty), mask=m)
        tl.store(da + o_out, (b_dx * b_prev).to(da.dtype.element_ty), mask=m)
        b_dstate = tl.sum(tl.where((o_i == BT - 1)[:, None], b_dx, 0.0), axis=0)
    p_first = a + i_b * stride_ab + bos * stride_at + o_d
    b_first = tl.load(p_first, mask=m_d & (start < end), other=1.0).to(ACC)
    tl.store(dh0 + i_row * D + o_d, b_first * b_dstate, mask=m_d & (start == bos))


def linear_scan_fwd(
    a: Tensor, x: Tensor, h0: Tensor | None, chunk_size: int, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scan forward; arguments and results as in `reference.linear_scan_fwd`."""
    B, T, D = x.shape
    a, x, h0 = _channels_last(a), _channels_last(x), None if h0 is None else h0.contiguous()
    num_states = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    out = torch.empty((B, T, D), dtype=x.dtype, device=x.device)
    final = torch.empty((num_states, D), dtype=accumulation_dtype(x.dtype), device=x.device)
    if final.numel() == 0:
        return out, final
    grid, settings = _launch(x, num_states, chunk_size, packed=cu_seqlens is not None)
    with torch.cuda.device_of(x):
        launch(
            linear_scan_fwd_kernel, grid,
            a, x, h0, cu_seqlens, out, final,
            stride_ab=a.stride(0), stride_at=a.stride(1),
            stride_xb=x.stride(0), stride_xt=x.stride(1),
            HAS_STATE=h0 is not None, **settings,
        )  # fmt: skip
    return out, final


def linear_scan_bwd(
    dout: Tensor,
    dfinal: Tensor,
    a: Tensor,
    out: Tensor,
    h0: Tensor | None,
    chunk_size: int,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients; arguments and results as in `reference.linear_scan_bwd`."""
    dout, a, h0 = _channels_last(dout), _channels_last(a), None if h0 is None else h0.contiguous()
    da = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    dx = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    dh0 = torch.empty(dfinal.shape, dtype=dfinal.dtype, device=dfinal.device)
    if dh0.numel() == 0:
        return da, dx, dh0
    grid, settings = _launch(out, dh0.shape[0], chunk_size, packed=cu_seqlens is not None)
    with torch.cuda.device_of(out):
        launch(
            linear_scan_bwd_kernel, grid,
            dout, dfinal.contiguous(), a, out, h0, cu_seqlens, da, dx, dh0,
            stride_db=dout.stride(0), stride_dt=dout.stride(1),
            stride_ab=a.stride(0), stride_at=a.stride(1),
            HAS_STATE=h0 is not None, **settings,
        )  # fmt: skip
    return da, dx, dh0


def _channels_last(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _launch(x: Tensor, num_states: int, chunk_size: int, *, packed: bool) -> tuple[tuple, dict]:
    """Choose the tiles and spans; each lane of the warp loads 16 bytes of a token."""
    T, D = x.shape[1:]
    BD = min(next_power_of_2(D), 32 * 16 // x.element_size())
    # Only the GPU knows where the chunks of packed sequences begin, so each sequence is one span.
    L = chunk_size if chunk_size < T else 0
    split = L > 0 and not packed
    span = L * ceil_div(SPAN, L) if split else max(T, 1)
    num_spans = max(ceil_div(T, span), 1)
    settings = {
        "T": T, "num_spans": num_spans, "span": span, "L": L,
        "D": D, "BD": BD, "BT": 16 if x.element_size() >= 4 else 8,
        "ACC": tl.float64 if x.dtype == torch.float64 else tl.float32,
        "PACKED": packed, "num_warps": 1,
    }  # fmt: skip
    return (num_states * num_spans * ceil_div(D, BD),), settings
