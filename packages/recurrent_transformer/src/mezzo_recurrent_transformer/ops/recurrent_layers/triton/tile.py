"""Attention of a whole tile, whose pairs are all known, and its gradients.

A query sees the tokens before the tile, the persistent pairs of the tile's earlier blocks, and the
temporary pairs of its own block up to itself. Positions after the tile's last stand for the last:
so they need no mask when loaded, and no query sees nothing.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending, Keys
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.attention import (
    LOG2_E,
    add_earlier,
    add_keys,
    channels,
    indices,
    launch,
    of_head,
    scales,
    softmax_bwd,
    stored,
    tile_offsets,
    visible_slots,
)


@triton.jit(do_not_specialize=["seen", "lse", "B", "S", "L", "first", "b"])
def attend_tile_fwd_kernel(
    q, kt, vt, k, v, k_all, v_all, seen, slopes, o, lse, B, S, L, first, b, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM positions of one head."""
    i_m, i_b, i_h, begin = indices(B, S, H, BM)
    last = tl.minimum(begin + BM, S) - 1
    o_s, o_d = tl.minimum(begin + tl.arange(0, BM), last), channels(i_h, D, BD)
    o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_q = of_head(tl.load(q + o_tile), i_h, o_d, D)
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    # From the queries back, so that each query sees its own pair first.
    for i in tl.range(0, tl.cdiv(begin % b, BM) + 1, num_stages=1):
        o_j = begin - i * BM + tl.arange(0, BM)
        m_seen = (o_j[None, :] <= o_s[:, None]) & (o_j[None, :] // b == o_s[:, None] // b)
        _, o_kv = tile_offsets(i_m, i_b, i_h, tl.minimum(o_j, last), o_d, B, S, H, D)
        b_acc, b_m, b_l = add_keys(
            b_acc, b_m, b_l, b_q, tl.load(kt + o_kv), tl.load(vt + o_kv),
            o_s[:, None] - o_j[None, :], m_seen, slope2, scale2, PRECISION,
        )  # fmt: skip
    for j in tl.range(0, last // b * b, BM, num_stages=1):
        o_j = j + tl.arange(0, BM)
        m_seen = o_j[None, :] // b < o_s[:, None] // b
        _, o_kv = tile_offsets(i_m, i_b, i_h, tl.minimum(o_j, last), o_d, B, S, H, D)
        b_acc, b_m, b_l = add_keys(
            b_acc, b_m, b_l, b_q, tl.load(k + o_kv), tl.load(v + o_kv),
            o_s[:, None] - o_j[None, :], m_seen, slope2, scale2, PRECISION,
        )  # fmt: skip
    visible = visible_slots(seen, first, i_m, i_b, S)
    o_row = (i_m * B + i_b) * L * (H * D)
    b_acc, b_m, b_l = add_earlier(
        b_acc, b_m, b_l, b_q, k_all + o_row, v_all + o_row, o_s, o_d, visible, slope2, scale2,
        H, D, BN, PRECISION,
    )  # fmt: skip
    m_s = begin + tl.arange(0, BM) < S
    m_tile = stored(m_s, i_h, o_d, D)
    tl.store(o + o_tile, (b_acc / b_l[:, None]).to(o.dtype.element_ty), mask=m_tile)
    tl.store(lse + o_head, (b_m + tl.log2(b_l)) / LOG2_E, mask=m_s)


def attend_tile(tile: Attending, keys: Keys, slopes: Tensor, form: Form) -> None:
    """Write the attention output of a whole tile and its log-sum-exp, as in `eager`."""
    assert all(x.is_contiguous() for x in (*tile, *keys[:2]))
    _, S, B, _ = tile.q.shape
    grid, settings = launch(tile.q, form)
    with torch.cuda.device_of(tile.q):
        attend_tile_fwd_kernel[grid](
            *tile[:5], *keys[:3], slopes, tile.o, tile.lse, B, S, keys.k.shape[2], keys.first,
            form.block_size, scales(tile.q, form)[1], **settings,
        )  # fmt: skip


@triton.jit(do_not_specialize=["seen", "lse", "delta", "B", "S", "L", "first", "b"])
def attend_tile_bwd_kernel(
    q, kt, vt, k, v, k_all, v_all, seen, slopes, lse, do, delta, dqkv,
    B, S, L, first, b, scale, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Sum dq of BM positions of one head; if they are the WHOLE tile, dkt and dvt too."""
    i_m, i_b, i_h, begin = indices(B, S, H, BM)
    last = tl.minimum(begin + BM, S) - 1
    o_s, o_d = tl.minimum(begin + tl.arange(0, BM), last), channels(i_h, D, BD)
    m_s = begin + tl.arange(0, BM) < S
    o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_q = of_head(tl.load(q + o_tile), i_h, o_d, D)
    b_do = of_head(tl.load(do + o_tile), i_h, o_d, D)
    _o_head, o_grad = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, 3 * H, D)
    b_lse, b_delta = tl.load(lse + o_head)[:, None], tl.load(delta + o_head)[:, None]
    b_dq = tl.zeros([BM, BD], tl.float32)
    visible = visible_slots(seen, first, i_m, i_b, S)
    o_row = (i_m * B + i_b) * L * (H * D)
    m_tile = stored(m_s, i_h, o_d, D)
    for j in range(0, visible, BN):
        o_j = j + tl.arange(0, BN)
        m_j = o_j < visible
        o_kv = o_row + o_j.to(tl.int64)[:, None] * (H * D) + o_d[None, :]
        b_k = tl.load(k_all + o_kv, mask=m_j[:, None], other=0.0)
        b_v = tl.load(v_all + o_kv, mask=m_j[:, None], other=0.0)
        _, b_ds = softmax_bwd(
            b_q, b_k, b_do, b_v, b_lse, b_delta, visible + o_s[:, None] - o_j[None, :],
            m_j[None, :], slope2, scale2, PRECISION,
        )  # fmt: skip
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    for j in tl.range(0, last // b * b, BM, num_stages=1):
        o_j = j + tl.arange(0, BM)
        m_seen = o_j[None, :] // b < o_s[:, None] // b
        _, o_kv = tile_offsets(i_m, i_b, i_h, tl.minimum(o_j, last), o_d, B, S, H, D)
        b_k = tl.load(k + o_kv)
        _, b_ds = softmax_bwd(
            b_q, b_k, b_do, tl.load(v + o_kv), b_lse, b_delta, o_s[:, None] - o_j[None, :],
            m_seen, slope2, scale2, PRECISION,
        )  # fmt: skip
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
    for j in tl.range(begin // b * b // BM * BM, last + 1, BM, num_stages=1):
        o_j = j + tl.arange(0, BM)
        m_seen = (o_j[None, :] <= o_s[:, None]) & (o_j[None, :] // b == o_s[:, None] // b)
        _, o_kv = tile_offsets(i_m, i_b, i_h, tl.minimum(o_j, last), o_d, B, S, H, D)
        b_k = tl.load(kt + o_kv)
        b_p, b_ds = softmax_bwd(
            b_q, b_k, b_do, tl.load(vt + o_kv), b_lse, b_delta, o_s[:, None] - o_j[None, :],
            m_seen & m_s[:, None], slope2, scale2, PRECISION,
        )  # fmt: skip
        b_dq = tl.dot(b_ds.to(b_k.dtype), b_k, b_dq, input_precision=PRECISION)
        if WHOLE:
            b_dkt = tl.dot(tl.trans(b_ds.to(b_q.dtype)), b_q, input_precision=PRECISION) * scale
            b_dvt = tl.dot(tl.trans(b_p.to(b_do.dtype)), b_do, input_precision=PRECISION)
            p_dkt = dqkv + H * D + o_grad
            tl.store(p_dkt, b_dkt.to(dqkv.dtype.element_ty), mask=m_tile)
            tl.store(p_dkt + H * D, b_dvt.to(dqkv.dtype.element_ty), mask=m_tile)
    tl.store(dqkv + o_grad, (b_dq * scale).to(dqkv.dtype.element_ty), mask=m_tile)


@triton.jit(do_not_specialize=["lse", "delta", "B", "S", "b"])
def attend_tile_bwd_kernel_temporary(
    q, kt, vt, slopes, lse, do, delta, dqkv, B, S, b, scale, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dkt and dvt of BM positions of one head, over the queries of their blocks."""
    i_m, i_b, i_h, begin = indices(B, S, H, BM)
    last = tl.minimum(begin + BM, S) - 1
    o_j, o_d = tl.minimum(begin + tl.arange(0, BM), last), channels(i_h, D, BD)
    _, o_kv = tile_offsets(i_m, i_b, i_h, o_j, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_k = of_head(tl.load(kt + o_kv), i_h, o_d, D)
    b_v = of_head(tl.load(vt + o_kv), i_h, o_d, D)
    b_dk, b_dv = tl.zeros([BM, BD], tl.float32), tl.zeros([BM, BD], tl.float32)
    end = tl.minimum((last // b + 1) * b, S)
    for i in range(begin, end, BM):
        o_s = i + tl.arange(0, BM)
        m_s = o_s < end
        m_seen = (o_j[:, None] <= o_s[None, :]) & (o_j[:, None] // b == o_s[None, :] // b)
        o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
        b_q = tl.load(q + o_tile, mask=m_s[:, None], other=0.0)
        b_do = tl.load(do + o_tile, mask=m_s[:, None], other=0.0)
        b_lse = tl.load(lse + o_head, mask=m_s, other=0.0)
        b_delta = tl.load(delta + o_head, mask=m_s, other=0.0)
        b_p, b_ds = softmax_bwd(
            b_k, b_q, b_v, b_do, b_lse[None, :], b_delta[None, :], o_s[None, :] - o_j[:, None],
            m_seen & m_s[None, :], slope2, scale2, PRECISION,
        )  # fmt: skip
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    m_j = stored(begin + tl.arange(0, BM) < S, i_h, o_d, D)
    _o_head, o_grad = tile_offsets(i_m, i_b, i_h, o_j, o_d, B, S, 3 * H, D)
    p_dkt = dqkv + H * D + o_grad
    tl.store(p_dkt, (b_dk * scale).to(dqkv.dtype.element_ty), mask=m_j)
    tl.store(p_dkt + H * D, b_dv.to(dqkv.dtype.element_ty), mask=m_j)


def attend_tile_bwd(
    tile: Attending,
    do: Tensor,
    delta: Tensor,
    keys: Keys,
    slopes: Tensor,
    form: Form,
    dqkv: Tensor,
) -> None:
    """Write the gradients of a tile's queries and temporary pairs side by side, as in `eager`."""
    assert all(x.is_contiguous() for x in (*tile, do, delta, *keys[:2], dqkv))
    _, S, B, _ = do.shape
    grid, settings = launch(do, form)
    whole, b = settings["BM"] >= S, form.block_size
    with torch.cuda.device_of(do):
        attend_tile_bwd_kernel[grid](
            *tile[:5], *keys[:3], slopes, tile.lse, do, delta, dqkv,
            B, S, keys.k.shape[2], keys.first, b, *scales(do, form), WHOLE=whole, **settings,
        )  # fmt: skip
        if not whole:
            attend_tile_bwd_kernel_temporary[grid](
                *tile[:3], slopes, tile.lse, do, delta, dqkv, B, S, b, *scales(do, form),
                **settings,
            )  # fmt: skip
