"""The attention of leaves to leaves before them in their tile, and its gradients."""

import triton
import triton.language as tl
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending
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


@triton.jit(do_not_specialize=["lse", "B", "S", "begin", "size"])
def attend_leaves_fwd_kernel(
    q, k, v, o, lse, slopes, B, S, begin, size, scale2,
    H: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend from BM positions of one head, and go on with the softmax of what they have seen."""
    i_m, i_b, i_h, start = indices(B, size, H, BM)
    o_s, o_d = begin + start + tl.arange(0, BM), channels(i_h, D, BD)
    m_s = o_s < begin + size
    o_head, o_tile = tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H, D)
    slope2 = tl.load(slopes + i_h) * LOG2_E
    b_q = of_head(tl.load(q + o_tile, mask=m_s[:, None], other=0.0), i_h, o_d, D)
    # A softmax whose sum is one, or of nothing if m is -inf.
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


def attend_leaves(tile: Attending, slopes: Tensor, form: Form, begin: int, size: int) -> None:
    """Attend to leaves that are done; see `eager.attend_leaves`."""
    assert all(x.is_contiguous() for x in tile)
    _, S, B, _ = tile.q.shape
    queries = tile.q[:, begin : begin + size]
    grid, settings = launch(queries, form)
    attend_leaves_fwd_kernel[grid](
        tile.q, tile.k, tile.v, tile.o, tile.lse, slopes, B, S, begin, size,
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


def leaves_bwd(
    tile: Attending,
    do: Tensor,
    delta: Tensor,
    slopes: Tensor,
    form: Form,
    begin: int,
    size: int,
    dk: Tensor,
    dv: Tensor,
) -> None:
    """Add to dk and dv of leaves; see `eager.leaves_bwd`."""
    assert all(x.is_contiguous() for x in (*tile, do, delta, dk, dv))
    _, S, B, _ = do.shape
    grid, settings = launch(do[:, begin - size : begin], form)
    leaves_bwd_kernel[grid](
        tile.q, tile.k, tile.v, tile.lse, do, delta, slopes, dk, dv, B, S, begin, size,
        *scales(do, form), **settings,
    )  # fmt: skip
