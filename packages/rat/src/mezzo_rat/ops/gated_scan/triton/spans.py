"""Time split into spans: the choice of spans, their effect on a state, and the chain over them."""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

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

# With fewer than ENOUGH programs (8 warps an SM) time is split, to give about WANTED programs:
# several waves.
ENOUGH, WANTED = 1024, 4096
# The least tokens of a span, which must be worth a program, and the most spans, which are chained
# one after another.
SHORTEST, MOST = 128, 512
# Tokens that the forward loads at once; a multiple of EVERY, the distance of saved states.
TILE = 16


@triton.jit(do_not_specialize=["T", "num_spans", "span"])
def gated_scan_fwd_kernel_span(
    zvg, bias, lengths, h0, opens, product, local, T, num_spans, span, stride_b, stride_t,
    C: tl.constexpr, BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Compute the product of a span's gates, and its last state when it starts from zero.

    If a sequence begins inside the span, the last state does not depend on the state before the
    span. A product of -1 marks this case.
    """
    i_b, i_n, o_d, start, end = place(T, num_spans, span, C, BD)
    end = tl.where(i_n + 1 < num_spans, end, start)  # nothing follows the last span
    real_end = end_of_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = bias_shift(bias, o_d, C, BD)
    b_p, b_h = tl.full([BD], 1.0, tl.float32), tl.zeros([BD], tl.float32)
    for i_t in range(tl.cdiv(end - start, BT)):
        t_0 = start + i_t * BT
        p_z = zvg + i_b * stride_b + t_0 * stride_t + o_d
        b_v = load_rows(p_z + C, stride_t, t_0, real_end, m_d, 0.0, BT)
        b_g = load_rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        for i in tl.static_range(BT):
            if opens is not None:
                i_s, b_h = border(opens, h0, t_0 + i, end, b_h, o_d, C)
                b_p = tl.where(i_s >= 0, -1.0, b_p)
            b_f, b_w = sigmoids(exp_minus(b_g[i], b_shift))
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
    """Compute the product of a span's gates, and the gradient of the state before the span.

    The gradient assumes that none arrives from later spans. Otherwise as in the forward, but time
    runs backward: results are stored in the order from the last span to the first.
    """
    i_b, i_n, o_d, start, end = place(T, num_spans, span, C, BD)
    end = tl.where(i_n > 0, end, start)  # nothing precedes the first span
    real_end = end_of_real(lengths, i_b, end)
    m_d = o_d < C
    b_shift = bias_shift(bias, o_d, C, BD)
    b_p, b_dh = tl.full([BD], 1.0, tl.float32), tl.zeros([BD], tl.float32)
    num_tiles = tl.cdiv(end - start, BT)
    for i_t in range(num_tiles):
        t_0 = start + (num_tiles - 1 - i_t) * BT
        p_z = zvg + i_b * stride_b + t_0 * stride_t + o_d
        p_do = dout + i_b * stride_db + t_0 * stride_dt + o_d
        b_z = load_rows(p_z, stride_t, t_0, real_end, m_d, SHUT, BT)
        b_g = load_rows(p_z + 2 * C, stride_t, t_0, real_end, m_d, KEEP, BT)
        b_do = load_rows(p_do, stride_dt, t_0, end, m_d, 0.0, BT)
        for i in tl.static_range(BT - 1, -1, -1):
            if closes is not None:
                i_s, b_dh = border(closes, dfinal, t_0 + i, end, b_dh, o_d, C)
                b_p = tl.where(i_s >= 0, -1.0, b_p)
            b_f, _ = sigmoids(exp_minus(b_g[i], b_shift))
            b_s = sigmoid(exp_minus(b_z[i], 0.0))
            b_dh = b_f * (b_do[i].to(tl.float32) * b_s + b_dh)
            b_p = b_p * b_f if closes is None else tl.where(b_p < 0, b_p, b_p * b_f)
    o_n = (i_b * num_spans + num_spans - 1 - i_n) * C + o_d
    tl.store(product + o_n, b_p, mask=m_d)
    tl.store(local + o_n, b_dh, mask=m_d)


@triton.jit(do_not_specialize=["num_spans"])
def gated_scan_kernel_carry(
    product, local, first, carry, num_spans, C: tl.constexpr, BD: tl.constexpr, BN: tl.constexpr
):
    """Chain the spans of one row: compute what enters each span from what enters the first."""
    i_b, _, o_d, _, _ = place(1, 1, 1, C, BD)
    m_d = o_d < C
    b_c = tl.load(first + i_b * C + o_d, mask=m_d, other=0.0)
    for i_t in range(tl.cdiv(num_spans, BN)):
        n_0 = i_t * BN
        o_n = (i_b * num_spans + n_0) * C + o_d
        b_p = load_rows(product + o_n, C, n_0, num_spans, m_d, 0.0, BN)
        b_l = load_rows(local + o_n, C, n_0, num_spans, m_d, 0.0, BN)
        for i in tl.static_range(BN):
            tl.store(carry + o_n + i * C, b_c, mask=m_d & (n_0 + i < num_spans))
            b_c = tl.where(b_p[i] < 0, b_l[i], b_p[i] * b_c + b_l[i])


def split_time(zvg: Tensor) -> tuple[tuple[int], dict]:
    """Choose the channels of a program and the split of time, from the shapes alone.

    Returns the grid, and the kernel arguments that follow from this choice.
    """
    (B, T), C = zvg.shape[:2], zvg.shape[2] // 3
    BD = min(next_power_of_2(C), 32 * 8 // zvg.element_size())
    programs = B * ceil_div(C, BD)
    num_spans = 1
    if programs < ENOUGH:
        num_spans = min(ceil_div(WANTED, programs), ceil_div(T, SHORTEST), MOST)
    span = ceil_div(ceil_div(T, num_spans), TILE) * TILE
    num_spans = ceil_div(T, span)
    split = {"T": T, "num_spans": num_spans, "span": span, "C": C, "BD": BD, "num_warps": 1}
    return (programs * num_spans,), split


def empty_spans(zvg: Tensor, split: dict) -> tuple[Tensor, Tensor]:
    """Allocate a product of gates and a local result for every span."""
    shape = (zvg.shape[0], split["num_spans"], split["C"])
    product = torch.empty(shape, dtype=torch.float32, device=zvg.device)
    return product, torch.empty_like(product)


def chain(product: Tensor, local: Tensor, first: Tensor, split: dict) -> Tensor:
    """Return the state, or the gradient of one, that enters each span, (B, num_spans, C)."""
    carry = torch.empty_like(product)
    grid = (product.shape[0] * ceil_div(split["C"], split["BD"]),)
    launch(
        gated_scan_kernel_carry, grid,
        product, local, first, carry, split["num_spans"],
        C=split["C"], BD=split["BD"], BN=TILE, num_warps=1,
    )  # fmt: skip
    return carry
