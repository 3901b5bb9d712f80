"""The attention of a whole tile, its gradients, and those of its persistent pairs.

A query sees the tokens before the tile, the persistent pairs of the tile's earlier blocks, and the
temporary pairs of its own block up to itself. In the kernels of a whole tile, indices beyond the
tile are clamped to its last token: so loads need no mask, and no query sees nothing.
"""

import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Keys, Later
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.attention import (
    LOG2_E,
    add_earlier,
    add_keys,
    channels,
    indices,
    launch_settings,
    of_head,
    scales,
    softmax_bwd,
    stored,
    tile_offsets,
    visible_slots,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import BackwardWork, ForwardWork


@triton.jit(do_not_specialize=["seen", "lse", "B", "S", "L", "first"])
def attend_earlier_fwd_kernel(
    q, k, v, seen, slopes, o, lse, B, S, L, first, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM positions of one head."""
    i_m, i_b, i_h, begin = indices(B, S, H, BM)
    o_s, o_d = begin + tl.arange(0, BM), channels(i_h, D, BD)
    m_s = o_s < S
    o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
    b_q = of_head(tl.load(q + o_tile, mask=m_s[:, None], other=0.0), i_h, o_d, D)
    b_acc = tl.zeros([BM, BD], tl.float32)
    b_m = tl.full([BM], float("-inf"), tl.float32)
    b_l = tl.zeros([BM], tl.float32)
    visible = visible_slots(seen, first, i_m, i_b, S)
    o_row = (i_m * B + i_b) * L * (H * D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_acc, b_m, b_l = add_earlier(
        b_acc, b_m, b_l, b_q, k + o_row, v + o_row, o_s, o_d, visible, slope2, scale2,
        H, D, BN, PRECISION,
    )  # fmt: skip
    b_l = tl.where(visible > 0, b_l, 1.0)
    tl.store(o + o_tile, b_acc / b_l[:, None], mask=stored(m_s, i_h, o_d, D))
    tl.store(lse + o_head, (b_m + tl.log2(b_l)) / LOG2_E, mask=m_s)


def attend_earlier(work: ForwardWork, keys: Keys) -> None:
    """Attend from a tile's queries to all tokens before the tile; see `Parts.attend_earlier`."""
    q, o, lse = work.buffers.attending.q, work.buffers.attending.o, work.buffers.attending.lse
    assert all(x.is_contiguous() for x in (q, keys.k, keys.v, o, lse))
    _, S, B, _ = q.shape
    grid, settings = launch_settings(q, work.form)
    launch(
        attend_earlier_fwd_kernel, grid,
        q, keys.k, keys.v, keys.seen, work.slopes, o, lse, B, S, keys.k.shape[2], keys.first,
        scales(q, work.form)[1], **settings,
    )  # fmt: skip


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


def attend_tile(work: BackwardWork, keys: Keys) -> None:
    """Write the attention output of a whole tile and its log-sum-exp; see `Parts.attend_tile`."""
    tile, form = work.buffers.attending, work.form
    assert all(x.is_contiguous() for x in (*tile, *keys[:2]))
    _, S, B, _ = tile.q.shape
    grid, settings = launch_settings(tile.q, form)
    launch(
        attend_tile_fwd_kernel, grid,
        *tile[:5], *keys[:3], work.slopes, tile.o, tile.lse, B, S, keys.k.shape[2], keys.first,
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


def attend_tile_bwd(work: BackwardWork, keys: Keys, dqkv: Tensor) -> None:
    """Write the gradients of a tile's queries and temporary pairs; see `Parts.attend_tile_bwd`."""
    tile, form, do, delta = work.buffers.attending, work.form, work.buffers.do, work.buffers.delta
    assert all(x.is_contiguous() for x in (*tile, do, delta, *keys[:2], dqkv))
    _, S, B, _ = do.shape
    grid, settings = launch_settings(do, form)
    whole, b = settings["BM"] >= S, form.block_size
    launch(
        attend_tile_bwd_kernel, grid,
        *tile[:5], *keys[:3], work.slopes, tile.lse, do, delta, dqkv,
        B, S, keys.k.shape[2], keys.first, b, *scales(do, form), WHOLE=whole, **settings,
    )  # fmt: skip
    if not whole:
        launch(
            attend_tile_bwd_kernel_temporary, grid,
            *tile[:3], work.slopes, tile.lse, do, delta, dqkv, B, S, b, *scales(do, form),
            **settings,
        )  # fmt: skip


@triton.jit(do_not_specialize=["lse", "delta", "B", "S", "T", "begin"])
def pairs_bwd_kernel(
    k, v, q, do, lse, delta, slopes, dk, dv, B, S, T, begin, scale, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Sum dk and dv of BM keys of one head over all later tokens."""
    i_m, i_b, i_h, start = indices(B, S, H, BM)
    o_s, o_d = start + tl.arange(0, BM), channels(i_h, D, BD)
    m_s = o_s < S
    _, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
    b_k = of_head(tl.load(k + o_tile, mask=m_s[:, None], other=0.0), i_h, o_d, D)
    b_v = of_head(tl.load(v + o_tile, mask=m_s[:, None], other=0.0), i_h, o_d, D)
    b_dk, b_dv = tl.zeros([BM, BD], tl.float32), tl.zeros([BM, BD], tl.float32)
    o_row = (i_m * B + i_b) * T
    slope2 = tl.load(slopes + i_h) * LOG2_E
    after = (begin - S * i_m).to(tl.int32)
    for t in range(after, T, BN):
        o_t = t + tl.arange(0, BN)
        m_t = o_t < T
        o_q = (o_row + o_t)[:, None] * (H * D) + o_d[None, :]
        o_stats = (o_row + o_t) * H + i_h
        b_q = tl.load(q + o_q, mask=m_t[:, None], other=0.0)
        b_do = tl.load(do + o_q, mask=m_t[:, None], other=0.0)
        b_lse = tl.load(lse + o_stats, mask=m_t, other=0.0)
        b_delta = tl.load(delta + o_stats, mask=m_t, other=0.0)
        b_p, b_ds = softmax_bwd(
            b_k, b_q, b_v, b_do, b_lse[None, :], b_delta[None, :],
            o_t[None, :] - (after - S) - o_s[:, None], m_t[None, :], slope2, scale2, PRECISION,
        )  # fmt: skip
        b_dv = tl.dot(b_p.to(b_do.dtype), b_do, b_dv, input_precision=PRECISION)
        b_dk = tl.dot(b_ds.to(b_q.dtype), b_q, b_dk, input_precision=PRECISION)
    m_tile = stored(m_s, i_h, o_d, D)
    tl.store(dk + o_tile, b_dk * scale, mask=m_tile)
    tl.store(dv + o_tile, b_dv, mask=m_tile)


def pairs_bwd(work: BackwardWork, later: Later) -> None:
    """Write what the tokens after a tile give to dk and dv; see `Parts.pairs_bwd`."""
    k, v = work.buffers.attending.k, work.buffers.attending.v
    dk, dv = work.buffers.dk, work.buffers.dv
    assert all(x.is_contiguous() for x in (k, v, *later[:4], dk, dv))
    _, S, B, _ = k.shape
    grid, settings = launch_settings(k, work.form)
    launch(
        pairs_bwd_kernel, grid,
        k, v, *later[:4], work.slopes, dk, dv, B, S, later.q.shape[2], later.begin,
        *scales(k, work.form), **settings,
    )  # fmt: skip
