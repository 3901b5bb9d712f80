"""The gradients of each chunk's keys and values, summed over its readers in a fixed order."""

import math

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.form import Form
from mezzo_drt.ops.grouped_cross_attention.readers import Readers
from mezzo_drt.ops.grouped_cross_attention.saved import Saved
from mezzo_drt.ops.grouped_cross_attention.triton.backward import load_stats
from mezzo_drt.ops.grouped_cross_attention.triton.tiles import (
    LOG2_E,
    Tiles,
    backward_tiles,
    chunked,
    key_tile,
    load_keys,
    place,
)


@triton.jit
def add_queries(
    b_dk, b_dv, b_k, b_v, do, q, stats, p_order, count, i_h, scale2,
    QUERIES: tl.constexpr, M: tl.constexpr, R: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contributions of the first QUERIES queries of `count` readers to dk and dv.

    All these queries form one sequence, of which BM are loaded at a time.
    """
    o_d = tl.arange(0, D)
    for t in range(0, count * QUERIES, BM):
        o_t = t + tl.arange(0, BM)
        m_t = o_t < count * QUERIES
        read = tl.load(p_order + o_t // QUERIES, mask=m_t, other=0)
        row = (read // R).to(tl.int64) * M + o_t % QUERIES
        o_q = (row[:, None] * H + i_h) * D + o_d[None, :]
        o_l = (read.to(tl.int64) * H + i_h) * M + o_t % QUERIES
        b_q = tl.load(q + o_q, mask=m_t[:, None], other=0.0)
        b_do = tl.load(do + o_q, mask=m_t[:, None], other=0.0)
        # Places after the last query have q = 0 and lse = 0, so p = 1, times w = 0.
        b_lse, b_delta, b_w = load_stats(stats, o_l, m_t)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale2 - b_lse[None, :]) * b_w[None, :]
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_ds = (b_p * (b_dp - b_delta[None, :])).to(b_q.dtype)
        b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)
    return b_dk, b_dv


@triton.jit
def add_last_queries(
    b_dk, b_dv, b_k, b_v, do, q, weights, lse, stats, dlast, p_order, count, i_h, scale, scale2,
    M: tl.constexpr, R: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the contribution of each reader's last query; store its delta and its dq of this chunk.

    The program has all keys of the chunk, so delta is a sum over the rows of its tile.
    """
    o_d = tl.arange(0, D)
    for t in tl.range(0, count, BM, num_stages=2):
        o_t = t + tl.arange(0, BM)
        m_t = o_t < count
        read = tl.load(p_order + o_t, mask=m_t, other=0)
        row = (read // R).to(tl.int64) * M + M - 1
        o_q = (row[:, None] * H + i_h) * D + o_d[None, :]
        o_r = read.to(tl.int64) * H + i_h
        b_q = tl.load(q + o_q, mask=m_t[:, None], other=0.0)
        b_do = tl.load(do + o_q, mask=m_t[:, None], other=0.0)
        b_lse = tl.load(lse + o_r * M + M - 1, mask=m_t, other=0.0) * LOG2_E
        b_w = tl.load(weights + read, mask=m_t, other=0.0)
        b_s = tl.dot(b_k, tl.trans(b_q), input_precision=PRECISION)
        b_p = tl.exp2(b_s * scale2 - b_lse[None, :])
        b_dp = tl.dot(b_v, tl.trans(b_do), input_precision=PRECISION)
        b_delta = tl.sum(b_p * b_dp, 0)  # keys after the chunk's last have v = 0, so dp = 0
        tl.store(stats + (o_r * M + M - 1) * 4 + 1, b_delta, mask=m_t)
        b_p *= b_w[None, :]
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_ds = (b_p * (b_dp - b_delta[None, :])).to(b_q.dtype)
        b_dk = tl.dot(b_ds, b_q, b_dk, input_precision=PRECISION)
        b_dq = tl.dot(tl.trans(b_k), b_ds, input_precision=PRECISION)
        tl.store(dlast + (o_r * D)[None, :] + o_d[:, None], b_dq * scale, mask=m_t[None, :])
    return b_dk, b_dv


@triton.jit(do_not_specialize=["items", "chunks", "tiles", "size"])
def chunks_bwd_kernel(
    do, q, k, v, weights, lse, stats, order, offsets, parts, part_chunks, sums, dlast, dk, dv,
    items, chunks, tiles, size, scale, scale2,
    LAST: tl.constexpr, ONE_MORE: tl.constexpr, M: tl.constexpr, R: tl.constexpr, L: tl.constexpr,
    H: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dk and dv of BN keys of one head over a part of the chunk's readers.

    An early part stores its sums; the last one adds those of the early parts, and stores dk and dv.
    """
    i_h, i_p, i_n = place(items, tiles)
    i_c = i_p if LAST else tl.load(part_chunks + i_p)
    if i_c < chunks:
        begin, early = tl.load(offsets + i_c), tl.load(parts + i_c)
        if LAST:
            late = tl.load(parts + i_c + 1)
            begin += (late - early) * size
            count = (tl.load(offsets + i_c + 1) - begin).to(tl.int32)
        else:
            begin += (i_p - early) * size
            count = size
        b_k = load_keys(k, i_c, 0, i_n * BN, i_h, BN, D)
        b_v = load_keys(v, i_c, 0, i_n * BN, i_h, BN, D)
        b_dk, b_dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
        b_dk, b_dv = add_queries(
            b_dk, b_dv, b_k, b_v, do, q, stats, order + begin, count, i_h, scale2,
            M - 1 if ONE_MORE else M, M, R, H, D, BM, PRECISION,
        )  # fmt: skip
        if ONE_MORE:  # BM = 16 is the least for tl.dot, and most chunks have fewer readers
            b_dk, b_dv = add_last_queries(
                b_dk, b_dv, b_k, b_v, do, q, weights, lse, stats, dlast, order + begin, count, i_h,
                scale, scale2, M, R, H, D, 16, PRECISION,
            )  # fmt: skip
        o_n = i_n * BN + tl.arange(0, BN)
        m_n = (o_n < L)[:, None]
        o_k = (o_n[:, None] * H + i_h) * D + tl.arange(0, D)[None, :]
        each = L * H * D
        if LAST:
            for i in range(early, late):
                b_dk += tl.load(sums + 2 * i * each + o_k, mask=m_n, other=0.0)
                b_dv += tl.load(sums + (2 * i + 1) * each + o_k, mask=m_n, other=0.0)
            tl.store(dk + i_c * each + o_k, (b_dk * scale).to(dk.dtype.element_ty), mask=m_n)
            tl.store(dv + i_c * each + o_k, b_dv.to(dv.dtype.element_ty), mask=m_n)
        else:
            tl.store(sums + 2 * i_p * each + o_k, b_dk, mask=m_n)
            tl.store(sums + (2 * i_p + 1) * each + o_k, b_dv, mask=m_n)


def chunk_tiles(M: int, L: int, D: int, dtype: torch.dtype) -> Tiles:
    """Return the sizes for M queries of each reader and L keys of width D."""
    BN = key_tile(L, D, dtype)
    if dtype == torch.float32:
        return Tiles(16, BN, 4 if D <= 64 else 8, 1)
    if D == 128:
        return Tiles(32, BN, 4 if BN <= 64 else 8, 2)
    if BN * D <= 64 * 64:
        # Small tiles leave registers for a third program, and loads are issued further ahead.
        return Tiles(32, BN, 4, 5)
    return Tiles(64, BN, 8, 2)


def chunks_bwd(
    dout: Tensor, saved: Saved, dq: Tensor, stats: Tensor, readers: Readers, form: Form
) -> tuple[Tensor, Tensor]:
    """Return dk and dv; complete dq and stats, which come from `queries_bwd`."""
    q, k, v, _, weights, lse = saved
    (B, N, M, H, D), (_, S, L, *_), R = q.shape, k.shape, stats.shape[2]
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    one_more = backward_tiles(M, L, D, q.dtype).one_more
    dlast = None
    if one_more:  # zeros, because reads of no chunk (-1) are in no list
        dlast = lse.new_zeros(B, N, R, H, D)
        stats[..., -1, 1] = 0
    if dk.numel() > 0:
        sizes = chunk_tiles(M, L, D, q.dtype)
        tiles, keys, values = ceil_div(L, sizes.BN), chunked(k, sizes.BN), chunked(v, sizes.BN)
        sums = q.new_empty(len(readers.chunks), 2, L, H, D, dtype=torch.float32)
        for last in (False, True):
            items = B * S if last else len(sums)
            if items:
                launch(
                    chunks_bwd_kernel, (H * items * tiles,),
                    dout, q, keys, values, weights, lse, stats, readers.order, readers.offsets,
                    readers.parts, readers.chunks, sums, dlast, dk, dv, items, B * S, tiles,
                    readers.size, form.scale, form.scale * math.log2(math.e),
                    LAST=last, ONE_MORE=one_more, M=M, R=R, L=L, **sizes.settings(q),
                )  # fmt: skip
    if dlast is not None:
        dq[:, :, -1] = dlast.sum(2)
    return dk, dv
