"""The backward pass of the gated scan."""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from torch import Tensor

from mezzo_rat.ops.gated_scan.saved import Saved
from mezzo_rat.ops.gated_scan.triton.inputs import (
    channels_last,
    contiguous,
    owners_of,
    states_or_zeros,
)
from mezzo_rat.ops.gated_scan.triton.spans import (
    chain,
    empty_spans,
    gated_scan_bwd_kernel_span,
    split_time,
)
from mezzo_rat.ops.gated_scan.triton.tokens import (
    KEEP,
    SHUT,
    bias_shift,
    border,
    end_of_real,
    exp_minus,
    load_rows,
    place,
    sigmoids,
)

# Registers of a thread in the backward. With these 12 warps fit on an SM, with the compiler's own
# choice only 8.
REGISTERS = 168


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def gated_scan_bwd_kernel(
    dout, dfinal, zvg, bias, lengths, h0, opens, closes, kept, carry, dzvg, dbias, dh0,
    T, num_spans, span, stride_db, stride_dt, stride_b, stride_t,
    C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of BD channels of one span, from its end to its start."""
    i_b, i_n, o_d, start, end = place(T, num_spans, span, C, BD)
    real_end = end_of_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = bias_shift(bias, o_d, C, BD)
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
        b_g = load_rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        b_v = load_rows(p_z + C, stride_t, t_0, real_end, m_d, 0.0, BT)
        b_z = load_rows(p_z, stride_t, t_0, real_end, m_d, SHUT, BT)
        b_do = load_rows(p_do, stride_dt, t_0, end, m_d, 0.0, BT)
        # Forward: compute dz, and the factors d, f, w, m of the walk back, which computes
        # dh += d, dv = w dh, dg = m dh, dh *= f.
        steps = ()
        for i in tl.static_range(BT):
            t = t_0 + i
            if opens is not None:
                _, b_h = border(opens, h0, t, end, b_h, o_d, C)
            b_f, b_w = sigmoids(exp_minus(b_g[i], b_shift))
            b_s, b_not_s = sigmoids(exp_minus(b_z[i], 0.0))
            b_x, b_d = b_v[i].to(tl.float32), b_do[i].to(tl.float32) * b_s
            # Take h[t-1] - v[t]: with a small gate h[t] is close to v[t], and h[t] - v[t] would
            # lose its digits.
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
                _, b_dh = border(closes, dfinal, t, end, b_dh, o_d, C)
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


def gated_scan_bwd(
    dout: Tensor, dfinal: Tensor | None, saved: Saved, every: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of the inputs from those of `out` and of the last states.

    Args:
        dout: (B, T, C).
        dfinal: (B, C), or (S, C) when packed; None: zeros.
        saved: the inputs of the forward, and the states that it saved.
        every: the tokens from one saved state to the next.

    Returns:
        dzvg (B, T, 3C) in zvg's dtype; dbias (C,) and dh0, (B, C) or (S, C), both in float32.
    """
    zvg, dout = channels_last(saved.zvg), channels_last(dout)
    (B, T), C = zvg.shape[:2], zvg.shape[2] // 3
    gate_bias, lengths = contiguous(saved.gate_bias), contiguous(saved.lengths)
    cu_seqlens = saved.cu_seqlens
    h0, dfinal = (
        states_or_zeros(saved.initial_state, zvg, cu_seqlens),
        states_or_zeros(dfinal, zvg, cu_seqlens),
    )
    dh0 = dfinal.clone()
    dzvg = torch.empty(zvg.shape, dtype=zvg.dtype, device=zvg.device)
    if zvg.numel() == 0:
        return dzvg, torch.zeros(C, dtype=torch.float32, device=zvg.device), dh0
    opens, closes = owners_of(cu_seqlens, T)
    grid, split = split_time(zvg)
    dbias = torch.empty((B * split["num_spans"], C), dtype=torch.float32, device=zvg.device)
    settings = {
        "stride_db": dout.stride(0), "stride_dt": dout.stride(1),
        "stride_b": zvg.stride(0), "stride_t": zvg.stride(1), "BT": every, **split,
    }  # fmt: skip
    with torch.cuda.device_of(zvg):
        carry = dfinal
        if split["num_spans"] > 1:
            product, local = empty_spans(zvg, split)
            launch(
                gated_scan_bwd_kernel_span, grid,
                dout, dfinal, zvg, gate_bias, lengths, closes, product, local, **settings,
            )  # fmt: skip
            carry = chain(product, local, dfinal, split)
        launch(
            gated_scan_bwd_kernel, grid,
            dout, dfinal, zvg, gate_bias, lengths, h0, opens, closes, saved.kept, carry,
            dzvg, dbias, dh0, maxnreg=REGISTERS, **settings,
        )  # fmt: skip
    return dzvg, dbias.sum(0), dh0
