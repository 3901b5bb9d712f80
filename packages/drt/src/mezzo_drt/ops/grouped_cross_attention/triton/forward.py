"""The forward: attention from the queries of a chunk to the chunks that it reads."""

import math

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.online_softmax.triton import add_scores
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.form import Form
from mezzo_drt.ops.grouped_cross_attention.triton.tiles import (
    LN_2,
    chunked,
    forward_tiles,
    load_keys,
    load_reads,
    logits,
    pick,
    place,
    row_offsets,
)


@triton.jit
def softmax(b_s, b_w, scale2, AXIS: tl.constexpr, SOFTMAX1: tl.constexpr):
    """Return the softmax along AXIS times the weight of its chunk, and the log-sum-exp."""
    b_m = tl.max(b_s, AXIS) * scale2
    if SOFTMAX1:
        b_m = tl.maximum(b_m, 0.0)
    b_p = tl.exp2(b_s * scale2 - tl.expand_dims(b_m, AXIS))
    b_l = tl.sum(b_p, AXIS)
    if SOFTMAX1:
        b_l += tl.exp2(-b_m)
    b_log = tl.log2(b_l)
    return b_p * tl.expand_dims(b_w * tl.exp2(-b_log), AXIS), (b_m + b_log) * LN_2


@triton.jit(do_not_specialize=["chunks", "N", "S", "M", "tiles"])
def attend_fwd_kernel(
    q, k, v, indices, weights, out, lse, chunks, N, S, M, tiles, scale2,
    SOFTMAX1: tl.constexpr, R: tl.constexpr, L: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, ONE_MORE: tl.constexpr, READS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM queries of one head in one chunk, and from the one that is left over."""
    i_h, i_c, i_m = place(chunks, tiles)
    first = i_c // N * S
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < M
    q += i_c * M * (H * D)
    out += i_c * M * (H * D)
    o_q = row_offsets(o_m, i_h, H, D)
    b_q = tl.load(q + o_q, mask=m_m[:, None], other=0.0)
    b_acc = tl.zeros([BM, D], tl.float32)
    o_r = tl.arange(0, READS)
    b_index, b_weight = load_reads(indices, weights, i_c, R, READS)
    if ONE_MORE:
        o_last = row_offsets(M - 1 + 0 * o_r, i_h, H, D)
        b_last = tl.load(q + o_last)
        b_scores = tl.zeros([BN, READS], tl.float32)
    for r in range(R):
        index, weight = pick(b_index, r), pick(b_weight, r)
        p_lse = lse + ((i_c * R + r) * H + i_h) * M
        if L <= BN:
            b_k = load_keys(k, index, first, 0, i_h, BN, D)
            b_v = load_keys(v, index, first, 0, i_h, BN, D)
            b_s = logits(b_q, b_k, 0, L, BN, 1, PRECISION)
            if ONE_MORE:
                b_new = logits(b_k, b_last, 0, L, BN, 0, PRECISION)
                b_scores = tl.where(o_r[None, :] == r, b_new, b_scores)
            b_p, b_lse = softmax(b_s, weight, scale2, 1, SOFTMAX1)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
        else:
            # An online softmax over the tiles of the chunk; softmax1's own key comes first.
            b_m = tl.full([BM], 0.0 if SOFTMAX1 else float("-inf"), tl.float32)
            b_l = tl.full([BM], 1.0 if SOFTMAX1 else 0.0, tl.float32)
            b_o = tl.zeros([BM, D], tl.float32)
            for j in range(0, L, BN):
                b_k = load_keys(k, index, first, j, i_h, BN, D)
                b_v = load_keys(v, index, first, j, i_h, BN, D)
                b_s = logits(b_q, b_k, j, L, BN, 1, PRECISION)
                b_p, b_o, b_m, b_l = add_scores(b_o, b_m, b_l, b_s, scale2)
                b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
            b_acc += b_o * (weight / b_l)[:, None]
            b_lse = (b_m + tl.log2(b_l)) * LN_2
        tl.store(p_lse + o_m, b_lse, mask=m_m)
    tl.store(out + o_q, b_acc.to(out.dtype.element_ty), mask=m_m[:, None])
    if ONE_MORE and i_m == tiles - 1:
        b_p, b_lse = softmax(b_scores, b_weight, scale2, 0, SOFTMAX1)
        tl.store(lse + ((i_c * R + o_r) * H + i_h) * M + M - 1, b_lse, mask=o_r < R)
        b_p = b_p.to(q.dtype.element_ty)
        b_out = tl.zeros([D, READS], tl.float32)
        for r in tl.range(0, R, num_stages=4):  # short, so it looks further ahead
            b_v = load_keys(v, pick(b_index, r), first, 0, i_h, BN, D)
            b_new = tl.dot(tl.trans(b_v), b_p, input_precision=PRECISION)
            b_out += tl.where(o_r[None, :] == r, b_new, 0.0)
        b_o = tl.sum(b_out, 1).to(out.dtype.element_ty)
        tl.store(out + ((M - 1) * H + i_h) * D + tl.arange(0, D), b_o)


def attend(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, form: Form
) -> tuple[Tensor, Tensor]:
    """Return out, like q, and lse (B, N, R, H, M) float32, natural."""
    (B, N, M, H, D), (_, S, L, *_), R = q.shape, k.shape, indices.shape[2]
    out, lse = torch.empty_like(q), q.new_empty(B, N, R, H, M, dtype=torch.float32)
    if q.numel() == 0:
        return out, lse
    assert q.is_contiguous()
    assert indices.is_contiguous()
    assert weights.is_contiguous()
    sizes = forward_tiles(M, L, D, q.dtype)
    tiles, keys, values = sizes.count(M), chunked(k, sizes.BN), chunked(v, sizes.BN)
    launch(
        attend_fwd_kernel, (H * B * N * tiles,),
        q, keys, values, indices, weights, out, lse, B * N, N, S, M, tiles,
        form.scale * math.log2(math.e), SOFTMAX1=form.softmax1, L=L, ONE_MORE=sizes.one_more,
        **sizes.query_settings(q, R),
    )  # fmt: skip
    return out, lse
