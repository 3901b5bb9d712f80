"""Attention from a tile's queries to all tokens before the tile."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Keys
from mezzo_recurrent_transformer.ops.recurrent_layers.triton.attention import (
    LOG2_E,
    add_earlier,
    channels,
    indices,
    launch,
    of_head,
    scales,
    stored,
    tile_offsets,
    visible_slots,
)


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


def attend_earlier(
    q: Tensor, keys: Keys, slopes: Tensor, form: Form, o: Tensor, lse: Tensor
) -> None:
    """Attend from a tile's queries (m, S, B, C) to all tokens before the tile, as in `eager`."""
    assert all(x.is_contiguous() for x in (q, keys.k, keys.v, o, lse))
    _, S, B, _ = q.shape
    grid, settings = launch(q, form)
    with torch.cuda.device_of(q):
        attend_earlier_fwd_kernel[grid](
            q, keys.k, keys.v, keys.seen, slopes, o, lse, B, S, keys.k.shape[2], keys.first,
            scales(q, form)[1], **settings,
        )  # fmt: skip
