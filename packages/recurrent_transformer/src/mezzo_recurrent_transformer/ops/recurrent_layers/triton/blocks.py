"""The attention of a step of several tokens, a block, forward and backward.

Positions after a block's last stand for the last: they need no mask when loaded.
"""

import triton
import triton.language as tl
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import leaf_of
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.attention import (
    LOG2_E,
    add_keys,
    channels,
    indices,
    launch,
    of_head,
    scales,
    softmax_bwd,
    stored,
    tile_offsets,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.rows import normed_bwd, split_pair


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
    # What comes before the leaf: a softmax whose sum is one, or of nothing if m is -inf.
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


def attend_step(
    tile: Attending,
    kv: Tensor | None,
    k_norm: Tensor | None,
    slopes: Tensor,
    form: Form,
    step: int,
    out: Tensor,
) -> None:
    """Store the pairs of the step before, then attend; see `eager.attend_step`."""
    assert all(x.is_contiguous() for x in (*tile, out))
    (_, S, B, _), b = tile.q.shape, form.block_size
    first = step * b
    if kv is not None:
        before = slice(first - b, first)
        split_pair(kv, k_norm, form, tile.k[:, before], tile.v[:, before])
    grid, settings = launch(out, form)
    attend_block_fwd_kernel[grid](
        *tile, slopes, out, B, S, b, first, leaf_of(first, S, b).start,
        scales(out, form)[1], **settings,
    )  # fmt: skip


@triton.jit(do_not_specialize=["lse", "delta", "B", "S", "b", "first", "end"])
def pairs_block_bwd_kernel(
    q, k, v, o, lse, do, delta, slopes, dk, dv, dpair, B, S, b, first, end, scale, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add what the leaf's later steps give to BM pairs of the block of one head: dk, and dpair."""
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
        # Only the next step's is new; all are found anew, which is as fast as to read them.
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
    """Finish the gradients of a block's pairs, and go through the keys' norm; as in `eager`."""
    assert all(x.is_contiguous() for x in (*tile, do, delta, dk, dv, dpair))
    (_, S, B, C), b = do.shape, form.block_size
    rows = slice(step * b, (step + 1) * b)
    grid, settings = launch(do[:, rows], form)
    pairs_block_bwd_kernel[grid](
        tile.q, tile.k, tile.v, tile.o, tile.lse, do, delta, slopes, dk, dv, dpair,
        B, S, b, rows.start, leaf_of(rows.start, S, b).stop, *scales(do, form), **settings,
    )  # fmt: skip
    into = dpair[:, rows, :, :C]
    normed_bwd(dk[:, rows], raw[:, rows], k_norm, form, None, 1.0, None, into)
