"""The forward pass of the gated scan."""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_rat.ops.gated_scan.triton.inputs import (
    channels_last,
    contiguous,
    owners_of,
    states_or_zeros,
)
from mezzo_rat.ops.gated_scan.triton.spans import (
    TILE,
    chain,
    empty_spans,
    gated_scan_fwd_kernel_span,
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
    sigmoid,
    sigmoids,
)


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def gated_scan_fwd_kernel(
    zvg, bias, lengths, h0, opens, closes, carry, out, final, kept, T, num_spans, span,
    stride_b, stride_t,
    C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr, EVERY: tl.constexpr,
):  # fmt: skip
    """Scan BD channels of one span forward from the state that enters it."""
    i_b, i_n, o_d, start, end = place(T, num_spans, span, C, BD)
    real_end = end_of_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = bias_shift(bias, o_d, C, BD)
    b_h = tl.load(carry + (i_b * num_spans + i_n) * C + o_d, mask=m_d, other=0.0)
    for i_t in range(tl.cdiv(end - start, BT)):
        t_0 = start + i_t * BT
        p_z = zvg + i_b * stride_b + t_0 * stride_t + o_d
        b_g = load_rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        b_v = load_rows(p_z + C, stride_t, t_0, real_end, m_d, 0.0, BT)
        b_z = load_rows(p_z, stride_t, t_0, real_end, m_d, SHUT, BT)
        if EVERY > 0:
            p_kept = kept + (i_b * tl.cdiv(T, EVERY) + t_0 // EVERY) * C + o_d
        for i in tl.static_range(BT):
            t = t_0 + i
            m = m_d & (t < end)
            if EVERY > 0 and i % EVERY == 0:
                tl.store(p_kept + i // EVERY * C, b_h, mask=m)
            if opens is not None:
                _, b_h = border(opens, h0, t, end, b_h, o_d, C)
            b_f, b_w = sigmoids(exp_minus(b_g[i], b_shift))
            b_h = b_f * b_h + b_w * b_v[i].to(tl.float32)
            b_out = sigmoid(exp_minus(b_z[i], 0.0)) * b_h
            tl.store(out + (i_b * T + t) * C + o_d, b_out.to(out.dtype.element_ty), mask=m)
            if closes is not None:
                i_s = tl.load(closes + t, mask=t < end, other=-1).to(tl.int64)
                tl.store(final + i_s * C + o_d, b_h, mask=m & (i_s >= 0))
    if closes is None:
        tl.store(final + i_b * C + o_d, b_h, mask=m_d & (end == T))


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
        every: save the states before tokens 0, every, 2 every, ... for the backward; 0 saves none.

    Returns:
        out (B, T, C) in zvg's dtype; the last states and the saved states (B, N, C), in float32.
    """
    (B, T), C = zvg.shape[:2], zvg.shape[2] // 3
    zvg, gate_bias, lengths = channels_last(zvg), contiguous(gate_bias), contiguous(lengths)
    h0 = states_or_zeros(initial_state, zvg, cu_seqlens)
    final = h0.clone()
    out = torch.empty((B, T, C), dtype=zvg.dtype, device=zvg.device)
    num_kept = ceil_div(T, every) if every else 0
    kept = torch.empty((B, num_kept, C), dtype=torch.float32, device=zvg.device)
    if out.numel() == 0:
        return out, final, kept
    opens, closes = owners_of(cu_seqlens, T)
    grid, split = split_time(zvg)
    settings = {"stride_b": zvg.stride(0), "stride_t": zvg.stride(1), "BT": TILE, **split}
    with torch.cuda.device_of(zvg):
        carry = h0
        if split["num_spans"] > 1:
            product, local = empty_spans(zvg, split)
            launch(
                gated_scan_fwd_kernel_span, grid,
                zvg, gate_bias, lengths, h0, opens, product, local, **settings,
            )  # fmt: skip
            carry = chain(product, local, h0, split)
        launch(
            gated_scan_fwd_kernel, grid,
            zvg, gate_bias, lengths, h0, opens, closes, carry, out, final, kept,
            EVERY=every, **settings,
        )  # fmt: skip
    return out, final, kept
