"""The gradient of the queries, and statistics that the gradient of the chunks needs."""

import math

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.form import Form
from mezzo_drt.ops.grouped_cross_attention.saved import Saved
from mezzo_drt.ops.grouped_cross_attention.triton.tiles import (
    LOG2_E,
    backward_tiles,
    chunked,
    load_keys,
    load_reads,
    logits,
    pick,
    place,
    row_offsets,
)


@triton.jit
def store_stats(stats, o_l, b_lse, b_delta, b_w, mask):
    """Store lse in base 2, delta, the weight of the read and a zero, side by side.

    So one load brings all four where the gradients of chunks gather queries.
    """
    b_zero = tl.zeros_like(b_lse)
    b_stats = tl.join(tl.join(b_lse, b_w), tl.join(b_delta, b_zero))
    b_stats = tl.reshape(b_stats, [b_lse.shape[0], 4])
    tl.store(stats + o_l[:, None] * 4 + tl.arange(0, 4)[None, :], b_stats, mask=mask[:, None])


@triton.jit
def load_stats(stats, o_l, mask):
    """Load what `store_stats` stored: lse, delta and the weight; zeros if masked."""
    o_4 = o_l[:, None] * 4 + tl.arange(0, 4)[None, :]
    b_stats = tl.load(stats + o_4, mask=mask[:, None], other=0.0)
    b_first, b_second = tl.split(tl.reshape(b_stats, [o_l.shape[0], 2, 2]))
    b_lse, b_w = tl.split(b_first)
    b_delta, _ = tl.split(b_second)
    return b_lse, b_delta, b_w


@triton.jit(do_not_specialize=["chunks", "N", "S", "M", "tiles"])
def queries_bwd_kernel(
    do, q, k, v, indices, weights, lse, stats, dq, chunks, N, S, M, tiles,
    scale, scale2,
    R: tl.constexpr, L: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, READS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dq over the chunks read, and store the stats that the gradient of each chunk needs.

    delta = Σ p dp equals do · O_j, so its sum over heads and queries is the gradient of w_j. A
    query that is left over (see `tiles.py`) has no program here: `chunks_bwd` does all this for it.
    """
    i_h, i_c, i_m = place(chunks, tiles)
    first = i_c // N * S
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < M
    q += i_c * M * (H * D)
    do += i_c * M * (H * D)
    dq += i_c * M * (H * D)
    o_q = row_offsets(o_m, i_h, H, D)
    b_q = tl.load(q + o_q, mask=m_m[:, None], other=0.0)
    b_do = tl.load(do + o_q, mask=m_m[:, None], other=0.0)
    b_dq = tl.zeros([BM, D], tl.float32)
    b_index, b_weight = load_reads(indices, weights, i_c, R, READS)
    for r in range(R):
        index, weight = pick(b_index, r), pick(b_weight, r)
        o_read = ((i_c * R + r) * H + i_h) * M
        b_lse = tl.load(lse + o_read + o_m, mask=m_m, other=0.0) * LOG2_E
        if L <= BN:
            b_k = load_keys(k, index, first, 0, i_h, BN, D)
            b_v = load_keys(v, index, first, 0, i_h, BN, D)
            b_p = tl.exp2(logits(b_q, b_k, 0, L, BN, 1, PRECISION) * scale2 - b_lse[:, None])
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_delta = tl.sum(b_p * b_dp, 1)
            b_ds = (b_p * (b_dp - b_delta[:, None]) * weight).to(b_k.dtype)
            b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
        else:
            b_delta = tl.zeros([BM], tl.float32)
            for j in range(0, L, BN):
                b_k = load_keys(k, index, first, j, i_h, BN, D)
                b_v = load_keys(v, index, first, j, i_h, BN, D)
                b_p = tl.exp2(logits(b_q, b_k, j, L, BN, 1, PRECISION) * scale2 - b_lse[:, None])
                b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
                b_delta += tl.sum(b_p * b_dp, 1)
            for j in range(0, L, BN):
                b_k = load_keys(k, index, first, j, i_h, BN, D)
                b_v = load_keys(v, index, first, j, i_h, BN, D)
                b_p = tl.exp2(logits(b_q, b_k, j, L, BN, 1, PRECISION) * scale2 - b_lse[:, None])
                b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
                b_ds = (b_p * (b_dp - b_delta[:, None]) * weight).to(b_k.dtype)
                b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
        store_stats(stats, o_read + o_m, b_lse, b_delta, weight + tl.zeros_like(b_lse), m_m)
    tl.store(dq + o_q, (b_dq * scale).to(dq.dtype.element_ty), mask=m_m[:, None])


def queries_bwd(dout: Tensor, saved: Saved, form: Form) -> tuple[Tensor, Tensor]:
    """Return dq, and stats (B, N, R, H, M, 4) float32 of each read, see `store_stats`.

    Both lack the query that is left over, if there is one.
    """
    q, k, v, indices, weights, lse = saved
    (B, N, M, H, D), (_, S, L, *_), R = q.shape, k.shape, indices.shape[2]
    dq, stats = torch.empty_like(q), lse.new_empty(*lse.shape, 4)
    if q.numel() == 0:
        return dq, stats
    sizes = backward_tiles(M, L, D, q.dtype)
    tiles, keys, values = sizes.count(M), chunked(k, sizes.BN), chunked(v, sizes.BN)
    launch(
        queries_bwd_kernel, (H * B * N * tiles,),
        dout, q, keys, values, indices, weights, lse, stats, dq, B * N, N, S, M, tiles,
        form.scale, form.scale * math.log2(math.e), L=L, **sizes.query_settings(q, R),
    )  # fmt: skip
    return dq, stats
