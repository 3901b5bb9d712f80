"""The forward: what the queries of a chunk get from the chunks that it reads."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.form import Form
from mezzo_drt.ops.grouped_cross_attention.triton.tiles import (
    LN_2,
    Tiles,
    chunked,
    key_tile,
    load_keys,
    logits,
    place,
    query_tiles,
    row_offsets,
)


@triton.jit
def softmax(b_s, weight, AXIS: tl.constexpr, SOFTMAX1: tl.constexpr):
    """Return the softmax along AXIS times the weight of the chunk, and the log-sum-exp."""
    b_m = tl.max(b_s, AXIS)
    if SOFTMAX1:
        b_m = tl.maximum(b_m, 0.0)
    b_p = tl.exp2(b_s - tl.expand_dims(b_m, AXIS))
    b_l = tl.sum(b_p, AXIS)
    if SOFTMAX1:
        b_l += tl.exp2(-b_m)
    return b_p * tl.expand_dims(weight / b_l, AXIS), (b_m + tl.log2(b_l)) * LN_2


@triton.jit(do_not_specialize=["chunks", "N", "S", "M", "R", "tiles"])
def attend_fwd_kernel(
    q, k, v, indices, weights, out, lse, chunks, N, S, M, R, tiles,
    k_chunk, k_row, v_chunk, v_row, scale2,
    SOFTMAX1: tl.constexpr, L: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM queries of one head in one chunk, and from those left over."""
    i_h, i_c, i_m = place(chunks, tiles)
    first = i_c // N * S
    o_m = i_m * BM + tl.arange(0, BM)
    m_m = o_m < M
    q += i_c * M * (H * D)
    out += i_c * M * (H * D)
    o_q = row_offsets(o_m, i_h, H, D)
    b_q = tl.load(q + o_q, mask=m_m[:, None], other=0.0)
    b_acc = tl.zeros([BM, D], tl.float32)
    if BX:
        o_x = tiles * BM + tl.arange(0, BX)
        m_x = (o_x < M) & (i_m == tiles - 1)
        o_qx = row_offsets(o_x, i_h, H, D)
        b_qx = tl.load(q + o_qx, mask=m_x[:, None], other=0.0)
        b_accx = tl.zeros([D, BX], tl.float32)
    for r in range(R):
        index = tl.load(indices + i_c * R + r)
        weight = tl.load(weights + i_c * R + r, mask=index >= 0, other=0.0)
        p_lse = lse + ((i_c * R + r) * H + i_h) * M
        if L <= BN:
            b_k = load_keys(k, index, first, 0, k_chunk, k_row, i_h, L, BN, D)
            b_v = load_keys(v, index, first, 0, v_chunk, v_row, i_h, L, BN, D)
            b_s = logits(b_q, b_k, 0, scale2, L, BN, 1, PRECISION)
            if BX:
                b_sx = logits(b_k, b_qx, 0, scale2, L, BN, 0, PRECISION)
            b_p, b_lse = softmax(b_s, weight, 1, SOFTMAX1)
            b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
            if BX:
                b_px, b_lsex = softmax(b_sx, weight, 0, SOFTMAX1)
                b_px = b_px.to(b_v.dtype)
                b_accx = tl.dot(tl.trans(b_v), b_px, b_accx, input_precision=PRECISION)
                tl.store(p_lse + o_x, b_lsex, mask=m_x)
        else:
            # An online softmax over the tiles of the chunk; softmax1's own key comes first.
            b_m = tl.full([BM], 0.0 if SOFTMAX1 else float("-inf"), tl.float32)
            b_l = tl.full([BM], 1.0 if SOFTMAX1 else 0.0, tl.float32)
            b_o = tl.zeros([BM, D], tl.float32)
            for j in range(0, L, BN):
                b_k = load_keys(k, index, first, j, k_chunk, k_row, i_h, L, BN, D)
                b_v = load_keys(v, index, first, j, v_chunk, v_row, i_h, L, BN, D)
                b_s = logits(b_q, b_k, j, scale2, L, BN, 1, PRECISION)
                b_new = tl.maximum(b_m, tl.max(b_s, 1))
                b_p, b_shrink = tl.exp2(b_s - b_new[:, None]), tl.exp2(b_m - b_new)
                b_l = b_l * b_shrink + tl.sum(b_p, 1)
                b_o = b_o * b_shrink[:, None]
                b_o = tl.dot(b_p.to(b_v.dtype), b_v, b_o, input_precision=PRECISION)
                b_m = b_new
            b_acc += b_o * (weight / b_l)[:, None]
            b_lse = (b_m + tl.log2(b_l)) * LN_2
        tl.store(p_lse + o_m, b_lse, mask=m_m)
    tl.store(out + o_q, b_acc.to(out.dtype.element_ty), mask=m_m[:, None])
    if BX:
        b_out = tl.trans(b_accx).to(out.dtype.element_ty)
        tl.store(out + o_qx, b_out, mask=m_x[:, None])


def forward_tiles(M: int, L: int, D: int, dtype: torch.dtype) -> Tiles:
    """Return the sizes for M queries and L keys of width D."""
    BN = key_tile(L, D, dtype)
    if dtype == torch.float32:
        return Tiles(16, 0, BN, 4 if D <= 128 else 8, 1)
    BM, BX = query_tiles(M, BN, L, 128 if D <= 64 else 64)
    warps = 4 if max(BM, BN) <= 64 and D <= 128 else 8
    return Tiles(BM, BX, BN, warps, 3 if BN * D <= 128 * 64 else 2)


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
    tiles, keys, values = sizes.count(M), chunked(k), chunked(v)
    attend_fwd_kernel[(H * B * N * tiles,)](
        q, keys.x, values.x, indices, weights, out, lse, B * N, N, S, M, R, tiles,
        keys.chunk, keys.row, values.chunk, values.row, form.scale * math.log2(math.e),
        SOFTMAX1=form.softmax1, L=L, **sizes.settings(q),
    )  # fmt: skip
    return out, lse
