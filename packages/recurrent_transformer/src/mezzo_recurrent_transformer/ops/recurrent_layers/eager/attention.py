"""What the attention of steps and of tiles share: heads, ALiBi, and logits."""

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending, Keys


def heads(x: Tensor, num_heads: int) -> Tensor:
    """Split the channels of (m, S, B, C) into heads, in float32 or float64."""
    return x.to(accumulation_dtype(x.dtype)).unflatten(-1, (num_heads, -1))


def by_head(factor: Tensor, x: Tensor) -> Tensor:
    """Repeat (m, S, B, H) for the channels of each head of x."""
    return factor.repeat_interleave(x.shape[-1] // factor.shape[-1], -1)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Return the scaled products (m, B, H, Q, K) of position-first q and k."""
    return torch.einsum("mqbhd,mkbhd->mbhqk", q, k) * q.shape[-1] ** -0.5


def bias(slopes: Tensor, distance: Tensor) -> Tensor:
    """Return slope * distance, (..., H, Q, K) from (H,) and (..., 1, Q, K) or (Q, K)."""
    return slopes[:, None, None] * distance.to(slopes.dtype)


def earlier_logits(q: Tensor, keys: Keys, slopes: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, L) of the tokens before a tile, and their values."""
    H, S = form.num_heads, q.shape[1]
    before = keys.before(S)
    L = keys.k.shape[2] if keys.seen is not None else max(keys.first, 0)
    slot = torch.arange(L, device=q.device)
    hidden = slot >= before[..., None]  # (m, B, L)
    k, v = heads(keys.k[:, :, :L], H), heads(keys.v[:, :, :L], H)
    # What is hidden may hold anything, NaN too.
    v = v.masked_fill(hidden[..., None, None], 0)
    logits = torch.einsum("msbhd,mblhd->mbhsl", heads(q, H), k) * k.shape[-1] ** -0.5
    distance = before[:, :, None, None] + torch.arange(S, device=q.device)[:, None] - slot
    logits = logits - bias(slopes, distance[:, :, None])
    return logits.masked_fill(hidden[:, :, None, None], -torch.inf), v


def own_logits(tile: Attending, slopes: Tensor, form: Form) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, 2S) of a tile's own persistent and temporary pairs, and v."""
    H, S = form.num_heads, tile.q.shape[1]
    place = torch.arange(S, device=tile.q.device)
    distance = place[:, None] - place
    block = place // form.block_size
    persistent = block[:, None] > block
    temporary = (block[:, None] == block) & (distance >= 0)
    both = torch.cat([heads(tile.k, H), heads(tile.kt, H)], 1)
    logits = products(heads(tile.q, H), both) - bias(slopes, torch.cat([distance, distance], 1))
    values = torch.cat([heads(tile.v, H), heads(tile.vt, H)], 1)
    return logits.masked_fill(~torch.cat([persistent, temporary], 1), -torch.inf), values
