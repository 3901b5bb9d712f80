"""The gradients of keys and values: each chunk's, summed over its readers in order."""

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
    Tiles,
    chunked,
    key_tile,
    load_keys,
    place,
)


@triton.jit(do_not_specialize=["items", "chunks", "tiles", "size"])
def chunks_bwd_kernel(
    do, q, k, v, stats, order, offsets, parts, part_chunks, sums, dk, dv,
    items, chunks, tiles, size, scale, scale2,
    LAST: tl.constexpr, M: tl.constexpr, R: tl.constexpr, L: tl.constexpr, H: tl.constexpr,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dk and dv of BN keys of one head over a part of the chunk's readers.

    An early part stores its sums; the last one adds those of the early parts, and stores dk and dv.
    The queries of all readers are one row of queries, of which BM come at a time: so no tile is
    filled up where M is one more than BM.
    """
    i_h, i_p, i_n = place(items, tiles)
    i_c = i_p if LAST else tl.load(part_chunks + i_p)
    if i_c < chunks:
        begin, early = tl.load(offsets + i_c), tl.load(parts + i_c)
        if LAST:
            late = tl.load(parts + i_c + 1)
            begin += (late - early) * size
            count = (tl.load(offsets + i_c + 1) - begin).to(tl.int32) * M
        else:
            begin += (i_p - early) * size
            count = size * M
        b_k = load_keys(k, i_c, 0, i_n * BN, i_h, BN, D)
        b_v = load_keys(v, i_c, 0, i_n * BN, i_h, BN, D)
        b_dk, b_dv = tl.zeros([BN, D], tl.float32), tl.zeros([BN, D], tl.float32)
        o_d = tl.arange(0, D)
        for t in range(0, count, BM):
            o_t = t + tl.arange(0, BM)
            m_t = o_t < count
            read = tl.load(order + begin + o_t // M, mask=m_t, other=0)
            row = (read // R).to(tl.int64) * M + o_t % M
            o_q = (row[:, None] * H + i_h) * D + o_d[None, :]
            o_l = (read.to(tl.int64) * H + i_h) * M + o_t % M
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
        o_n = i_n * BN + tl.arange(0, BN)
        m_n = (o_n < L)[:, None]
        o_k = (o_n[:, None] * H + i_h) * D + o_d[None, :]
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
        # Small tiles leave registers for a third program, and loads go further ahead.
        return Tiles(32, BN, 4, 5)
    return Tiles(64, BN, 8, 2)


def chunks_bwd(
    dout: Tensor, saved: Saved, stats: Tensor, readers: Readers, form: Form
) -> tuple[Tensor, Tensor]:
    """Return dk and dv; `stats` come from `queries_bwd`."""
    q, k, v, *_ = saved
    (_, _, M, H, D), (B, S, L, *_), R = q.shape, k.shape, stats.shape[2]
    dk, dv = (x.new_empty(x.shape) for x in (k, v))
    if dk.numel() == 0:
        return dk, dv
    sizes = chunk_tiles(M, L, D, q.dtype)
    tiles, keys, values = ceil_div(L, sizes.BN), chunked(k, sizes.BN), chunked(v, sizes.BN)
    sums = q.new_empty(len(readers.chunks), 2, L, H, D, dtype=torch.float32)
    for last in (False, True):
        items = B * S if last else len(sums)
        if items:
            launch(
                chunks_bwd_kernel, (H * items * tiles,),
                dout, q, keys, values, stats, readers.order, readers.offsets,
                readers.parts, readers.chunks, sums, dk, dv, items, B * S, tiles, readers.size,
                form.scale, form.scale * math.log2(math.e),
                LAST=last, M=M, R=R, L=L, **sizes.settings(q),
            )  # fmt: skip
    return dk, dv
