"""What the tokens after a tile give to the gradients of its persistent pairs."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Later
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.attention import (
    LOG2_E,
    channels,
    indices,
    launch,
    of_head,
    scales,
    softmax_bwd,
    stored,
    tile_offsets,
)


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


def pairs_bwd(
    k: Tensor, v: Tensor, later: Later, slopes: Tensor, form: Form, dk: Tensor, dv: Tensor
) -> None:
    """Write what the tokens after a tile give to dk and dv (m, S, B, C), as in `eager`."""
    assert all(x.is_contiguous() for x in (k, v, *later[:4], dk, dv))
    _, S, B, _ = k.shape
    grid, settings = launch(k, form)
    with torch.cuda.device_of(k):
        pairs_bwd_kernel[grid](
            k, v, *later[:4], slopes, dk, dv, B, S, later.q.shape[2], later.begin,
            *scales(k, form), **settings,
        )  # fmt: skip
