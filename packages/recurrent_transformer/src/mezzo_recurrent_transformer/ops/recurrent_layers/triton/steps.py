"""The attention of one step of a tile, forward and backward; these kernels are for one token."""

import triton
import triton.language as tl
from mezzo_core.ops.sizes import next_power_of_2
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import LEAF, leaf_of
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import blocks


def attend_step(
    tile: Attending,
    kv: Tensor | None,
    k_norm: Tensor | None,
    slopes: Tensor,
    form: Form,
    step: int,
    out: Tensor,
) -> None:
    """Launch one program for some heads of a row; see `eager.attend_step`."""
    if form.block_size > 1:
        blocks.attend_step(tile, kv, k_norm, slopes, form, step, out)
        return
    m, S, B, C = tile.q.shape
    H = form.num_heads
    attend_step_kernel[(B * H, m)](
        tile.q, tile.kt, tile.vt, tile.k, tile.v, tile.o, tile.lse, kv, k_norm, slopes, out,
        step, leaf_of(step, S, 1).start, B, form.eps, (C // H) ** -0.5,
        S=S, C=C, D=C // H, BS=min(max(next_power_of_2(S), 2), LEAF), BC=next_power_of_2(C),
        NORM=form.norm, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["step", "first", "B"])
def attend_step_kernel(
    q, kt, vt, k, v, o, lse, kv, k_norm, slopes, out, step, first, B, eps, scale,
    S: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
    NORM: tl.constexpr,
):  # fmt: skip
    """Attend from one token and head, in one warp: no sum leaves it."""
    H: tl.constexpr = C // D
    i_b, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_m = tl.program_id(1).to(tl.int64)
    o_c = i_h * D + tl.arange(0, D)  # the channels of the head
    row = ((i_m * S + step) * B + i_b) * C
    b_q = tl.load(q + row + o_c).to(tl.float32) * scale
    slope = tl.load(slopes + i_h).to(tl.float32)

    # The token itself, by its temporary pair, and what comes before its leaf.
    b_vt = tl.load(vt + row + o_c).to(tl.float32)
    own = tl.sum(b_q * tl.load(kt + row + o_c).to(tl.float32), 0)
    earlier = tl.load(lse + ((i_m * S + step) * B + i_b) * H + i_h)
    b_o = tl.load(o + row + o_c)
    top = tl.maximum(own, earlier)

    if kv is not None:
        # The earlier tokens of the leaf, but for the last.
        o_s = first + tl.arange(0, BS)
        m_s = (o_s < step - 1)[:, None]
        o_tile = (i_m * S + o_s)[:, None] * B * C + i_b * C + o_c[None, :]
        b_ks = tl.load(k + o_tile, mask=m_s, other=0.0).to(tl.float32)
        b_vs = tl.load(v + o_tile, mask=m_s, other=0.0).to(tl.float32)
        # The last one's pair is normalized here, and kept for later steps.
        p_pair = kv + (i_m * B + i_b) * 2 * C
        b_k = tl.load(p_pair + o_c).to(tl.float32)
        if NORM != "none":
            o_row = tl.arange(0, BC)
            b_row = tl.load(p_pair + o_row, mask=o_row < C, other=0.0).to(tl.float32)
            if NORM == "layer":
                mean = tl.sum(b_row, 0) / C
                b_row = tl.where(o_row < C, b_row - mean, 0.0)
                b_k = b_k - mean
            rstd = tl.rsqrt(tl.sum(b_row * b_row, 0) / C + eps)
            b_k = b_k * rstd * tl.load(k_norm + i_m * C + o_c).to(tl.float32)
        b_k = b_k.to(k.dtype.element_ty)
        b_v = tl.load(p_pair + C + o_c)
        tl.store(k + row - B * C + o_c, b_k)
        tl.store(v + row - B * C + o_c, b_v)
        last = tl.sum(b_q * b_k.to(tl.float32), 0) - slope
        b_s = tl.sum(b_q[None, :] * b_ks, 1) - slope * (step - o_s)
        b_s = tl.where(o_s < step - 1, b_s, float("-inf"))
        top = tl.maximum(tl.maximum(top, last), tl.max(b_s, 0))
        b_p = tl.exp(b_s - top)
        weight = tl.exp(last - top)
        total = tl.sum(b_p, 0) + weight
        b_out = tl.sum(b_p[:, None] * b_vs, 0) + weight * b_v.to(tl.float32)
    else:
        total = 0.0
        b_out = tl.zeros([D], tl.float32)

    weight, before = tl.exp(own - top), tl.exp(earlier - top)
    total += weight + before
    b_out = (b_out + weight * b_vt + before * b_o) / total
    tl.store(out + (i_m * B + i_b) * C + o_c, b_out.to(out.dtype.element_ty))


def pairs_step_bwd(
    tile: Attending,
    do: Tensor,
    delta: Tensor,
    raw: Tensor,
    k_norm: Tensor | None,
    slopes: Tensor,
    form: Form,
    step: int,
    dk: Tensor,
    dv: Tensor,
    dpair: Tensor,
) -> None:
    """Launch one program a row; see `eager.pairs_step_bwd`."""
    if form.block_size > 1:
        blocks.pairs_step_bwd(tile, do, delta, raw, k_norm, slopes, form, step, dk, dv, dpair)
        return
    m, S, B, C = do.shape
    H = form.num_heads
    heads = next_power_of_2(H)
    pairs_step_bwd_kernel[(B, m)](
        tile.q, tile.k, tile.v, tile.o, tile.lse, do, delta, raw, k_norm, slopes, dk, dv, dpair,
        step, leaf_of(step, S, 1).stop, B, form.eps, (C // H) ** -0.5,
        S=S, H=H, D=C // H, HP=heads, NORM=form.norm,
        num_warps=max(1, min(16, heads * (C // H) // 256)),
    )  # fmt: skip


@triton.jit(do_not_specialize=["step", "end", "B"])
def pairs_step_bwd_kernel(
    q, k, v, o, lse, do, delta, raw, k_norm, slopes, dk, dv, dpair,
    step, end, B, eps, scale,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Go back through one token's persistent pair, all heads, and through the keys' norm."""
    i_b, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    C = H * D
    o_h = tl.arange(0, HP)
    m_h = o_h < H
    o_c = o_h[:, None] * D + tl.arange(0, D)[None, :]
    m_c = m_h[:, None]
    row = ((i_m * S + step) * B + i_b) * C
    b_k = tl.load(k + row + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_v = tl.load(v + row + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dk = tl.load(dk + row + o_c, mask=m_c, other=0.0)
    b_dv = tl.load(dv + row + o_c, mask=m_c, other=0.0)
    b_slope = tl.load(slopes + o_h, mask=m_h, other=0.0).to(tl.float32)

    if step + 1 < end:
        # The next token, whose gradient has just been found.
        after = row + B * C
        stats = ((i_m * S + step + 1) * B + i_b) * H + o_h
        b_q = tl.load(q + after + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_do = tl.load(do + after + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_o = tl.load(o + after + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_delta = tl.sum(b_do * b_o, 1)
        tl.store(delta + stats, b_delta, mask=m_h)
        b_lse = tl.load(lse + stats, mask=m_h, other=0.0)
        b_p = tl.exp(tl.sum(b_q * b_k, 1) * scale - b_slope - b_lse)
        b_ds = b_p * (tl.sum(b_do * b_v, 1) - b_delta) * scale
        b_dv += b_p[:, None] * b_do
        b_dk += b_ds[:, None] * b_q
        # The tokens after it, one at a time: several at once would not fit into the registers.
        for i_s in range(step + 2, end):
            after += B * C
            stats += B * H
            b_q = tl.load(q + after + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_do = tl.load(do + after + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_lse = tl.load(lse + stats, mask=m_h, other=0.0)
            b_delta = tl.load(delta + stats, mask=m_h, other=0.0)
            b_s = tl.sum(b_q * b_k, 1) * scale - b_slope * (i_s - step)
            b_p = tl.exp(b_s - b_lse)
            b_ds = b_p * (tl.sum(b_do * b_v, 1) - b_delta) * scale
            b_dv += b_p[:, None] * b_do
            b_dk += b_ds[:, None] * b_q
        tl.store(dk + row + o_c, b_dk, mask=m_c)  # for the gradient of the norm's weight

    if NORM != "none":
        b_x = tl.load(raw + row + o_c, mask=m_c, other=0.0).to(tl.float32)
        if NORM == "layer":
            b_x = tl.where(m_c, b_x - tl.sum(tl.sum(b_x, 1), 0) / C, 0.0)
        rstd = tl.rsqrt(tl.sum(tl.sum(b_x * b_x, 1), 0) / C + eps)
        b_x = b_x * rstd
        b_dk = b_dk * tl.load(k_norm + i_m * C + o_c, mask=m_c, other=0.0).to(tl.float32)
        dot = tl.sum(tl.sum(b_dk * b_x, 1), 0) / C
        mean = tl.sum(tl.sum(b_dk, 1), 0) / C
        b_dk = b_dk - b_x * dot
        if NORM == "layer":
            b_dk = b_dk - mean
        b_dk = b_dk * rstd
    pair = dpair + 2 * row + o_c
    tl.store(pair, b_dk.to(dpair.dtype.element_ty), mask=m_c)
    tl.store(pair + C, b_dv.to(dpair.dtype.element_ty), mask=m_c)
