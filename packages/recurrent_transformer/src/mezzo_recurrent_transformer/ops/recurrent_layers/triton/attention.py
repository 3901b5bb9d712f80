"""What the attention kernels share: settings of launches, and functions of kernels.

A program has BM positions of one head in one row of one layer's tile. It loads the head's D
channels, and of a head of 8 the neighbour's too: matrix products need 16. Logits are in base 2. All
tensors are contiguous: those of a tile (m, S, B, H D), those of all tokens (m, B, tokens, H D).
"""

import math
from typing import Any

import torch
import triton
import triton.language as tl
from mezzo_core.ops.online_softmax.triton import add_scores
from mezzo_core.ops.ptxas import require_ptxas
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form

require_ptxas()  # every module that launches attention's products imports this one

LOG2_E = tl.constexpr(math.log2(math.e))


def launch_settings(tile: Tensor, form: Form) -> tuple[tuple[int], dict[str, Any]]:
    """Return the grid and the constants for a kernel with programs over a tile (m, S, B, C)."""
    m, S, B, C = tile.shape
    H, D = form.num_heads, C // form.num_heads
    BM = max(next_power_of_2(S), 16)
    if tile.dtype == torch.float32:
        BM, BN, warps, stages = min(BM, 32), 32, 4, 2
    else:
        # One warp for 16 rows, so that no sum over a row crosses warps.
        BM = min(BM, 64)
        BN, warps, stages = 32 if BM <= 32 else 64, BM // 16 * max(D // 64, 1), 4
    settings = {
        "H": H, "D": D, "BD": max(D, 16), "BM": BM, "BN": BN,
        "PRECISION": "ieee" if tile.dtype == torch.float32 else "tf32",
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    return (H * ceil_div(S, BM) * B * m,), settings


def scales(tile: Tensor, form: Form) -> tuple[float, float]:
    """Return D^-0.5, and the factor that also brings logits to base 2."""
    scale = (tile.shape[-1] // form.num_heads) ** -0.5
    return scale, scale * math.log2(math.e)


@triton.jit
def indices(B, S, H: tl.constexpr, BM: tl.constexpr):
    """Return this program's layer, row, head and first position."""
    pid = tl.program_id(0)
    tiles = tl.cdiv(S, BM)
    i_b = pid // H // tiles
    return (i_b // B).to(tl.int64), i_b % B, pid % H, pid // H % tiles * BM


@triton.jit
def channels(i_h, D: tl.constexpr, BD: tl.constexpr):
    """Return the BD channels of this program."""
    return i_h * D // BD * BD + tl.arange(0, BD)


@triton.jit
def tile_offsets(i_m, i_b, i_h, o_s, o_d, B, S, H: tl.constexpr, D: tl.constexpr):
    """Return the offsets of positions in tensors of a tile, (m, S, B, H) and (m, S, B, H D)."""
    row = (i_m * S + o_s) * B + i_b
    return row * H + i_h, row[:, None] * (H * D) + o_d[None, :]


@triton.jit
def of_head(b_x, i_h, o_d, D: tl.constexpr):
    """Set the channels of another head to 0, so that products are of this head alone."""
    return b_x if D >= 16 else tl.where((o_d // D == i_h)[None, :], b_x, 0.0)


@triton.jit
def stored(m_s, i_h, o_d, D: tl.constexpr):
    """Return the mask for storing the channels of this head at the positions of `m_s`."""
    return m_s[:, None] if D >= 16 else m_s[:, None] & (o_d // D == i_h)[None, :]


@triton.jit
def add_keys(
    b_acc, b_m, b_l, b_q, b_k, b_v, b_distance, m_seen, slope2, scale2, PRECISION: tl.constexpr
):
    """Add keys to an online softmax. Each query must see a key, here or before."""
    b_s = tl.dot(b_q, tl.trans(b_k), input_precision=PRECISION) * scale2
    b_s = tl.where(m_seen, b_s - slope2 * b_distance.to(tl.float32), float("-inf"))
    b_p, b_acc, b_m, b_l = add_scores(b_acc, b_m, b_l, b_s, 1.0)
    b_acc = tl.dot(b_p.to(b_v.dtype), b_v, b_acc, input_precision=PRECISION)
    return b_acc, b_m, b_l


@triton.jit
def visible_slots(seen, first, i_m, i_b, S):
    """Return the number of slots before a tile."""
    visible = first - S * i_m
    if seen is not None:
        visible += tl.load(seen + i_b)
    return visible.to(tl.int32)


@triton.jit
def add_earlier(
    b_acc, b_m, b_l, b_q, k, v, o_s, o_d, visible, slope2, scale2,
    H: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the visible slots of a row, whose first channels k and v point to."""
    for j in range(0, visible, BN):
        o_j = j + tl.arange(0, BN)
        m_j = o_j < visible
        o_kv = o_j.to(tl.int64)[:, None] * (H * D) + o_d[None, :]
        b_k = tl.load(k + o_kv, mask=m_j[:, None], other=0.0)
        b_v = tl.load(v + o_kv, mask=m_j[:, None], other=0.0)
        b_acc, b_m, b_l = add_keys(
            b_acc, b_m, b_l, b_q, b_k, b_v, visible + o_s[:, None] - o_j[None, :], m_j[None, :],
            slope2, scale2, PRECISION,
        )  # fmt: skip
    return b_acc, b_m, b_l


@triton.jit
def softmax_bwd(
    b_a, b_b, b_x, b_y, b_lse, b_delta, b_distance, m_seen, slope2, scale2,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return p, and ds without the scale, as queries by keys or as keys by queries.

    a bᵀ are the products of queries and keys, x yᵀ those of do and values. b_lse (natural) and
    b_delta, one for each query, are a column or a row.
    """
    b_s = tl.dot(b_a, tl.trans(b_b), input_precision=PRECISION) * scale2
    b_p = tl.exp2(b_s - slope2 * b_distance.to(tl.float32) - b_lse * LOG2_E)
    b_p = tl.where(m_seen, b_p, 0.0)
    return b_p, b_p * (tl.dot(b_x, tl.trans(b_y), input_precision=PRECISION) - b_delta)
