"""The gradient of the queries, and what that of the chunks needs from it."""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.form import Form
from mezzo_drt.ops.grouped_cross_attention.op import Saved
from mezzo_drt.ops.grouped_cross_attention.triton.tiles import (
    LOG2_E,
    Tiles,
    chunked,
    key_tile,
    load_keys,
    logits,
    place,
    query_tiles,
    row_offsets,
)


@triton.jit(do_not_specialize=["chunks", "N", "S", "M", "R", "tiles"])
def queries_bwd_kernel(
    do, q, k, v, indices, weights, lse, delta, dq, chunks, N, S, M, R, tiles,
    k_chunk, k_row, v_chunk, v_row, scale, scale2,
    L: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BX: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dq over the chunks read, and store each chunk's delta = Σ p dp.

    delta is also do · O_j, so that its sum over heads and queries is the gradient of w_j.
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
    if BX:
        o_x = tiles * BM + tl.arange(0, BX)
        m_x = (o_x < M) & (i_m == tiles - 1)
        o_qx = row_offsets(o_x, i_h, H, D)
        b_qx = tl.load(q + o_qx, mask=m_x[:, None], other=0.0)
        b_dox = tl.load(do + o_qx, mask=m_x[:, None], other=0.0)
        b_dqx = tl.zeros([D, BX], tl.float32)
    for r in range(R):
        index = tl.load(indices + i_c * R + r)
        weight = tl.load(weights + i_c * R + r, mask=index >= 0, other=0.0)
        o_read = ((i_c * R + r) * H + i_h) * M
        b_lse = tl.load(lse + o_read + o_m, mask=m_m, other=0.0) * LOG2_E
        if L <= BN:
            b_k = load_keys(k, index, first, 0, k_chunk, k_row, i_h, L, BN, D)
            b_v = load_keys(v, index, first, 0, v_chunk, v_row, i_h, L, BN, D)
            b_p = tl.exp2(logits(b_q, b_k, 0, scale2, L, BN, 1, PRECISION) - b_lse[:, None])
            b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
            b_delta = tl.sum(b_p * b_dp, 1)
            b_ds = (b_p * (b_dp - b_delta[:, None]) * weight).to(b_k.dtype)
            b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
            if BX:
                b_lsex = tl.load(lse + o_read + o_x, mask=m_x, other=0.0) * LOG2_E
                b_p = tl.exp2(logits(b_k, b_qx, 0, scale2, L, BN, 0, PRECISION) - b_lsex[None, :])
                b_dp = tl.dot(b_v, tl.trans(b_dox), input_precision=PRECISION)
                b_deltax = tl.sum(b_p * b_dp, 0)
                b_ds = (b_p * (b_dp - b_deltax[None, :]) * weight).to(b_k.dtype)
                b_dqx = tl.dot(tl.trans(b_k), b_ds, b_dqx, input_precision=PRECISION)
                tl.store(delta + o_read + o_x, b_deltax, mask=m_x)
        else:
            b_delta = tl.zeros([BM], tl.float32)
            for j in range(0, L, BN):
                b_k = load_keys(k, index, first, j, k_chunk, k_row, i_h, L, BN, D)
                b_v = load_keys(v, index, first, j, v_chunk, v_row, i_h, L, BN, D)
                b_p = tl.exp2(logits(b_q, b_k, j, scale2, L, BN, 1, PRECISION) - b_lse[:, None])
                b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
                b_delta += tl.sum(b_p * b_dp, 1)
            for j in range(0, L, BN):
                b_k = load_keys(k, index, first, j, k_chunk, k_row, i_h, L, BN, D)
                b_v = load_keys(v, index, first, j, v_chunk, v_row, i_h, L, BN, D)
                b_p = tl.exp2(logits(b_q, b_k, j, scale2, L, BN, 1, PRECISION) - b_lse[:, None])
                b_dp = tl.dot(b_do, tl.trans(b_v), input_precision=PRECISION)
                b_ds = (b_p * (b_dp - b_delta[:, None]) * weight).to(b_k.dtype)
                b_dq = tl.dot(b_ds, b_k, b_dq, input_precision=PRECISION)
        tl.store(delta + o_read + o_m, b_delta, mask=m_m)
    tl.store(dq + o_q, (b_dq * scale).to(dq.dtype.element_ty), mask=m_m[:, None])
    if BX:
        b_dqx = tl.trans(b_dqx * scale).to(dq.dtype.element_ty)
        tl.store(dq + o_qx, b_dqx, mask=m_x[:, None])


def backward_tiles(M: int, L: int, D: int, dtype: torch.dtype) -> Tiles:
    """Return the sizes for M queries and L keys of width D."""
    BN = key_tile(L, D, dtype)
    if dtype == torch.float32:
        return Tiles(16, 0, BN, 4 if D <= 64 else 8, 1)
    BM, BX = query_tiles(M, BN, L, 128 if D <= 64 else 64)
    warps = 4 if max(BM, BN) <= 64 and D <= 128 else 8
    return Tiles(BM, BX, BN, warps, 3 if BN * D <= 64 * 64 else 2)


def queries_bwd(dout: Tensor, saved: Saved, form: Form) -> tuple[Tensor, Tensor]:
    """Return dq, and delta (B, N, R, H, M) float32: do · O_j for each chunk read."""
    q, k, v, indices, weights, lse = saved
    (B, N, M, H, D), (_, S, L, *_), R = q.shape, k.shape, indices.shape[2]
    dq, delta = torch.empty_like(q), torch.empty_like(lse)
    if q.numel() == 0:
        return dq, delta
    sizes = backward_tiles(M, L, D, q.dtype)
    tiles, keys, values = sizes.count(M), chunked(k), chunked(v)
    queries_bwd_kernel[(H * B * N * tiles,)](
        dout, q, keys.x, values.x, indices, weights, lse, delta, dq, B * N, N, S, M, R, tiles,
        keys.chunk, keys.row, values.chunk, values.row,
        form.scale, form.scale * math.log2(math.e), L=L, **sizes.settings(q),
    )  # fmt: skip
    return dq, delta
