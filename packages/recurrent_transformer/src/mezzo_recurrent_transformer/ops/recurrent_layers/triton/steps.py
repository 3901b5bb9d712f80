"""The attention of a tile's steps, forward and backward: to their own leaf, and leaves to leaves.

A step of one token has kernels of its own, with a program for some heads or for a whole row. In
those for a block of several tokens, indices beyond the block are clamped to its last token: so
loads need no mask.
"""

import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import next_power_of_2
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import LEAF, leaf_of
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.attention import (
    LOG2_E,
    add_keys,
    channels,
    indices,
    launch_settings,
    of_head,
    scales,
    softmax_bwd,
    stored,
    tile_offsets,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.early import early, wait
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import normed_bwd, split_pair
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import BackwardWork, ForwardWork


def attend_step(work: ForwardWork, kv: Tensor | None, step: int, out: Tensor) -> None:
    """Launch one program for some heads of a row; see `Parts.attend_step`."""
    if work.form.block_size > 1:
        _attend_block(work, kv, step, out)
        return
    tile, H = work.buffers.attending, work.form.num_heads
    m, S, B, C = tile.q.shape
    launch(
        attend_step_kernel, (B * H, m),
        *tile, kv, work.w.k_norm, work.slopes, out,
        step, leaf_of(step, S, 1).start, B, work.form.eps, (C // H) ** -0.5,
        S=S, C=C, D=C // H, BS=min(max(next_power_of_2(S), 2), LEAF), BC=next_power_of_2(C),
        NORM=work.form.norm, num_warps=1, **early(out),
    )  # fmt: skip


@triton.jit(do_not_specialize=["step", "first", "B"])
def attend_step_kernel(
    q, kt, vt, k, v, o, lse, kv, k_norm, slopes, out, step, first, B, eps, scale,
    S: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BS: tl.constexpr, BC: tl.constexpr,
    NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Attend from one token and head, in one warp: no sum leaves it."""
    H: tl.constexpr = C // D
    i_b, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_m = tl.program_id(1).to(tl.int64)
    o_c = i_h * D + tl.arange(0, D)  # the channels of the head
    row = ((i_m * S + step) * B + i_b) * C
    if kv is None:  # the kernel before may have written `o`
        wait(EARLY)
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
        b_s = tl.sum(b_q[None, :] * b_ks, 1) - slope * (step - o_s)
        b_s = tl.where(o_s < step - 1, b_s, float("-inf"))
        if NORM != "none":
            b_norm = tl.load(k_norm + i_m * C + o_c).to(tl.float32)
        wait(EARLY)
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
            b_k = b_k * rstd * b_norm
        b_k = b_k.to(k.dtype.element_ty)
        b_v = tl.load(p_pair + C + o_c)
        tl.store(k + row - B * C + o_c, b_k)
        tl.store(v + row - B * C + o_c, b_v)
        last = tl.sum(b_q * b_k.to(tl.float32), 0) - slope
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


@triton.jit(do_not_specialize=["lse", "B", "S", "b", "first", "leaf"])
def attend_block_fwd_kernel(
    q, kt, vt, k, v, o, lse, slopes, out, B, S, b, first, leaf, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM positions of the block of one head."""
    i_m, i_b, i_h, begin = indices(B, b, H, BM)
    o_b, o_d = begin + tl.arange(0, BM), channels(i_h, D, BD)
    last = first + tl.minimum(begin + BM, b) - 1
    o_s = tl.minimum(first + o_b, last)
    o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_q = of_head(tl.load(q + o_tile), i_h, o_d, D)
    # The attention to tokens before the leaf, divided by its sum; nothing if m is -inf.
    b_acc, b_m = tl.load(o + o_tile).to(tl.float32), tl.load(lse + o_head) * LOG2_E
    b_l = tl.full([BM], 1.0, tl.float32)
    # From the queries back, so that each query sees its own pair first.
    for i in tl.range(0, begin // BM + 1, num_stages=1):
        o_j = first + begin - i * BM + tl.arange(0, BM)
        _, o_kv = tile_offsets(i_m, i_b, i_h, tl.minimum(o_j, last), o_d, B, S, H, D)
        b_distance = o_s[:, None] - o_j[None, :]
        b_acc, b_m, b_l = add_keys(
            b_acc, b_m, b_l, b_q, tl.load(kt + o_kv), tl.load(vt + o_kv), b_distance,
            b_distance >= 0, slope2, scale2, PRECISION,
        )  # fmt: skip
    if leaf < first:  # less than BM earlier tokens of the leaf
        o_j = leaf + tl.arange(0, BM)
        m_j = o_j < first
        _, o_kv = tile_offsets(i_m, i_b, i_h, o_j, o_d, B, S, H, D)
        b_k = tl.load(k + o_kv, mask=m_j[:, None], other=0.0)
        b_v = tl.load(v + o_kv, mask=m_j[:, None], other=0.0)
        b_acc, b_m, b_l = add_keys(
            b_acc, b_m, b_l, b_q, b_k, b_v, o_s[:, None] - o_j[None, :], m_j[None, :],
            slope2, scale2, PRECISION,
        )  # fmt: skip
    _, o_out = tile_offsets(i_m, i_b, i_h, o_b, o_d, B, b, H, D)
    b_out = (b_acc / b_l[:, None]).to(out.dtype.element_ty)
    tl.store(out + o_out, b_out, mask=stored(o_b < b, i_h, o_d, D))


def _attend_block(work: ForwardWork, kv: Tensor | None, step: int, out: Tensor) -> None:
    """Store the pairs of the step before, then attend."""
    tile, form = work.buffers.attending, work.form
    assert all(x.is_contiguous() for x in (*tile, out))
    (_, S, B, _), b = tile.q.shape, form.block_size
    first = step * b
    if kv is not None:
        before = slice(first - b, first)
        split_pair(kv, work.w.k_norm, form, tile.k[:, before], tile.v[:, before])
    grid, settings = launch_settings(out, form)
    launch(
        attend_block_fwd_kernel, grid,
        *tile, work.slopes, out, B, S, b, first, leaf_of(first, S, b).start,
        scales(out, form)[1], **settings,
    )  # fmt: skip


def pairs_step_bwd(work: BackwardWork, step: int) -> None:
    """Launch one program a row; see `Parts.pairs_step_bwd`."""
    if work.form.block_size > 1:
        _pairs_block_bwd(work, step)
        return
    t, tile, H = work.buffers, work.buffers.attending, work.form.num_heads
    m, S, B, C = t.do.shape
    heads = next_power_of_2(H)
    launch(
        pairs_step_bwd_kernel, (B, m),
        tile.q, tile.k, tile.v, tile.o, tile.lse, t.do, t.delta, t.raw, work.w.k_norm, work.slopes,
        t.dk, t.dv, t.dpair, step, leaf_of(step, S, 1).stop, B, work.form.eps, (C // H) ** -0.5,
        S=S, H=H, D=C // H, HP=heads, NORM=work.form.norm,
        num_warps=max(1, min(16, heads * (C // H) // 256)), **early(t.do[:, :1]),
    )  # fmt: skip


@triton.jit(do_not_specialize=["step", "end", "B"])
def pairs_step_bwd_kernel(
    q, k, v, o, lse, do, delta, raw, k_norm, slopes, dk, dv, dpair,
    step, end, B, eps, scale,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HP: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Go back through one token's persistent pair, all heads, and through the keys' norm."""
    i_b, i_m = tl.program_id(0), tl.program_id(1).to(tl.int64)
    C = H * D
    o_h = tl.arange(0, HP)
    m_h = o_h < H
    o_c = o_h[:, None] * D + tl.arange(0, D)[None, :]
    m_c = m_h[:, None]
    row = ((i_m * S + step) * B + i_b) * C
    if step + 1 >= end:  # the kernel before may have added to dk and dv
        wait(EARLY)
    b_k = tl.load(k + row + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_v = tl.load(v + row + o_c, mask=m_c, other=0.0).to(tl.float32)
    b_dk = tl.load(dk + row + o_c, mask=m_c, other=0.0)
    b_dv = tl.load(dv + row + o_c, mask=m_c, other=0.0)
    b_slope = tl.load(slopes + o_h, mask=m_h, other=0.0).to(tl.float32)

    if step + 1 < end:
        # The tokens after the next, one at a time: several would not fit into the registers.
        after = row + 2 * B * C
        stats = ((i_m * S + step + 2) * B + i_b) * H + o_h
        for i_s in range(step + 2, end):
            b_q = tl.load(q + after + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_do = tl.load(do + after + o_c, mask=m_c, other=0.0).to(tl.float32)
            b_lse = tl.load(lse + stats, mask=m_h, other=0.0)
            b_delta = tl.load(delta + stats, mask=m_h, other=0.0)
            b_s = tl.sum(b_q * b_k, 1) * scale - b_slope * (i_s - step)
            b_p = tl.exp(b_s - b_lse)
            b_ds = b_p * (tl.sum(b_do * b_v, 1) - b_delta) * scale
            b_dv += b_p[:, None] * b_do
            b_dk += b_ds[:, None] * b_q
            after += B * C
            stats += B * H
        # The next token, whose gradient has just been found.
        after = row + B * C
        stats = ((i_m * S + step + 1) * B + i_b) * H + o_h
        b_q = tl.load(q + after + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_o = tl.load(o + after + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_lse = tl.load(lse + stats, mask=m_h, other=0.0)
        wait(EARLY)
        b_do = tl.load(do + after + o_c, mask=m_c, other=0.0).to(tl.float32)
        b_delta = tl.sum(b_do * b_o, 1)
        tl.store(delta + stats, b_delta, mask=m_h)
        b_p = tl.exp(tl.sum(b_q * b_k, 1) * scale - b_slope - b_lse)
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


@triton.jit(do_not_specialize=["lse", "delta", "B", "S", "b", "first", "end"])
def pairs_block_bwd_kernel(
    q, k, v, o, lse, do, delta, slopes, dk, dv, dpair, B, S, b, first, end, scale, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients from the leaf's later steps to BM pairs of one head: to dk and dpair."""
    i_m, i_b, i_h, begin = indices(B, b, H, BM)
    o_b, o_d = begin + tl.arange(0, BM), channels(i_h, D, BD)
    o_j = first + tl.minimum(o_b, b - 1)
    _, o_kv = tile_offsets(i_m, i_b, i_h, o_j, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_k = of_head(tl.load(k + o_kv), i_h, o_d, D)
    b_v = tl.load(v + o_kv)
    b_dk, b_dv = tl.zeros([BM, BD], tl.float32), tl.load(dv + o_kv)
    if first + b < end:  # less than BM later tokens of the leaf
        o_s = first + b + tl.arange(0, BM)
        m_s = o_s < end
        o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
        b_q = tl.load(q + o_tile, mask=m_s[:, None], other=0.0)
        b_do = of_head(tl.load(do + o_tile, mask=m_s[:, None], other=0.0), i_h, o_d, D)
        b_o = tl.load(o + o_tile, mask=m_s[:, None], other=0.0)
        b_lse = tl.load(lse + o_head, mask=m_s, other=0.0)
        # Only the next step's is new, but computing all is as fast as reading them.
        b_delta = tl.sum(b_do.to(tl.float32) * b_o.to(tl.float32), 1)
        tl.store(delta + o_head, b_delta, mask=m_s & (begin == 0))
        b_p, b_ds = softmax_bwd(
            b_k, b_q, b_v, b_do, b_lse[None, :], b_delta[None, :], o_s[None, :] - o_j[:, None],
            m_s[None, :], slope2, scale2, PRECISION,
        )  # fmt: skip
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    m_own = stored(o_b < b, i_h, o_d, D)
    tl.store(dk + o_kv, tl.load(dk + o_kv) + b_dk * scale, mask=m_own)
    _, o_pair = tile_offsets(i_m, i_b, i_h, o_j, H * D + o_d, B, S, 2 * H, D)
    tl.store(dpair + o_pair, b_dv.to(dpair.dtype.element_ty), mask=m_own)


def _pairs_block_bwd(work: BackwardWork, step: int) -> None:
    """Finish the gradients of a block's pairs, and go through the keys' norm."""
    t, tile, form = work.buffers, work.buffers.attending, work.form
    assert all(x.is_contiguous() for x in (*tile, t.do, t.delta, t.dk, t.dv, t.dpair))
    (_, S, B, C), b = t.do.shape, form.block_size
    rows = slice(step * b, (step + 1) * b)
    grid, settings = launch_settings(t.do[:, rows], form)
    launch(
        pairs_block_bwd_kernel, grid,
        tile.q, tile.k, tile.v, tile.o, tile.lse, t.do, t.delta, work.slopes, t.dk, t.dv, t.dpair,
        B, S, b, rows.start, leaf_of(rows.start, S, b).stop, *scales(t.do, form), **settings,
    )  # fmt: skip
    into = t.dpair[:, rows, :, :C]
    normed_bwd(t.dk[:, rows], t.raw[:, rows], work.w.k_norm, form, None, 1.0, None, into)


@triton.jit(do_not_specialize=["lse", "B", "S", "begin", "size"])
def attend_leaves_fwd_kernel(
    q, k, v, o, lse, slopes, B, S, begin, size, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM positions of one head, continuing the softmax of what they have seen."""
    i_m, i_b, i_h, start = indices(B, size, H, BM)
    o_s, o_d = begin + start + tl.arange(0, BM), channels(i_h, D, BD)
    m_s = o_s < begin + size
    o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_q = of_head(tl.load(q + o_tile, mask=m_s[:, None], other=0.0), i_h, o_d, D)
    # The attention so far, divided by its sum; nothing if m is -inf.
    b_acc = tl.load(o + o_tile, mask=m_s[:, None], other=0.0).to(tl.float32)
    b_m = tl.load(lse + o_head, mask=m_s, other=0.0) * LOG2_E
    b_l = tl.full([BM], 1.0, tl.float32)
    for j in tl.range(begin - size, begin, BM, num_stages=1):
        o_j = j + tl.arange(0, BM)
        m_j = o_j < begin
        _, o_kv = tile_offsets(i_m, i_b, i_h, o_j, o_d, B, S, H, D)
        b_k = tl.load(k + o_kv, mask=m_j[:, None], other=0.0)
        b_v = tl.load(v + o_kv, mask=m_j[:, None], other=0.0)
        b_acc, b_m, b_l = add_keys(
            b_acc, b_m, b_l, b_q, b_k, b_v, o_s[:, None] - o_j[None, :], m_j[None, :],
            slope2, scale2, PRECISION,
        )  # fmt: skip
    b_out = (b_acc / b_l[:, None]).to(o.dtype.element_ty)
    tl.store(o + o_tile, b_out, mask=stored(m_s, i_h, o_d, D))
    tl.store(lse + o_head, (b_m + tl.log2(b_l)) / LOG2_E, mask=m_s)


def attend_leaves(work: ForwardWork, begin: int, size: int) -> None:
    """Attend to leaves that are done; see `Parts.attend_leaves`."""
    tile, form = work.buffers.attending, work.form
    assert all(x.is_contiguous() for x in tile)
    _, S, B, _ = tile.q.shape
    queries = tile.q[:, begin : begin + size]
    grid, settings = launch_settings(queries, form)
    launch(
        attend_leaves_fwd_kernel, grid,
        tile.q, tile.k, tile.v, tile.o, tile.lse, work.slopes, B, S, begin, size,
        scales(queries, form)[1], **settings,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lse", "delta", "B", "S", "begin", "size"])
def leaves_bwd_kernel(
    q, k, v, lse, do, delta, slopes, dk, dv, B, S, begin, size, scale, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dk and dv of BM keys of one head."""
    i_m, i_b, i_h, start = indices(B, size, H, BM)
    o_j, o_d = begin - size + start + tl.arange(0, BM), channels(i_h, D, BD)
    m_j = o_j < begin
    _, o_kv = tile_offsets(i_m, i_b, i_h, o_j, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_k = of_head(tl.load(k + o_kv, mask=m_j[:, None], other=0.0), i_h, o_d, D)
    b_v = of_head(tl.load(v + o_kv, mask=m_j[:, None], other=0.0), i_h, o_d, D)
    b_dk, b_dv = tl.zeros([BM, BD], tl.float32), tl.zeros([BM, BD], tl.float32)
    for i in tl.range(begin, begin + size, BM, num_stages=1):
        o_s = i + tl.arange(0, BM)
        m_s = o_s < begin + size
        o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
        b_q = tl.load(q + o_tile, mask=m_s[:, None], other=0.0)
        b_do = tl.load(do + o_tile, mask=m_s[:, None], other=0.0)
        b_lse = tl.load(lse + o_head, mask=m_s, other=0.0)
        b_delta = tl.load(delta + o_head, mask=m_s, other=0.0)
        b_p, b_ds = softmax_bwd(
            b_k, b_q, b_v, b_do, b_lse[None, :], b_delta[None, :], o_s[None, :] - o_j[:, None],
            m_s[None, :], slope2, scale2, PRECISION,
        )  # fmt: skip
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    m_own = stored(m_j, i_h, o_d, D)
    tl.store(dk + o_kv, tl.load(dk + o_kv, mask=m_own) + b_dk * scale, mask=m_own)
    tl.store(dv + o_kv, tl.load(dv + o_kv, mask=m_own) + b_dv, mask=m_own)


def leaves_bwd(work: BackwardWork, begin: int, size: int) -> None:
    """Add to dk and dv of leaves; see `Parts.leaves_bwd`."""
    t, tile, form = work.buffers, work.buffers.attending, work.form
    assert all(x.is_contiguous() for x in (*tile, t.do, t.delta, t.dk, t.dv))
    _, S, B, _ = t.do.shape
    grid, settings = launch_settings(t.do[:, begin - size : begin], form)
    launch(
        leaves_bwd_kernel, grid,
        tile.q, tile.k, tile.v, tile.lse, t.do, t.delta, work.slopes, t.dk, t.dv, B, S, begin, size,
        *scales(t.do, form), **settings,
    )  # fmt: skip
