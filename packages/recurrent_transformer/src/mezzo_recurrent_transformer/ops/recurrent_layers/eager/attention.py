"""What the attention of steps and of tiles share: ALiBi, and logits."""

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.rows import heads
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Keys
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import BackwardWork, ForwardWork


def by_head(factor: Tensor, x: Tensor) -> Tensor:
    """Repeat (m, S, B, H) for the channels of each head of x."""
    return factor.repeat_interleave(x.shape[-1] // factor.shape[-1], -1)


def products(q: Tensor, k: Tensor) -> Tensor:
    """Return the scaled products (m, B, H, Q, K) of position-first q and k."""
    return torch.einsum("mqbhd,mkbhd->mbhqk", q, k) * q.shape[-1] ** -0.5


def bias(slopes: Tensor, distance: Tensor) -> Tensor:
    """Return slope * distance, (..., H, Q, K) from (H,) and (..., 1, Q, K) or (Q, K)."""
    return slopes[:, None, None] * distance.to(slopes.dtype)


def earlier_logits(work: ForwardWork | BackwardWork, keys: Keys) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, L) of the tokens before a tile, and their values."""
    q, H = work.buffers.attending.q, work.form.num_heads
    S = q.shape[1]
    before = keys.before(S)
    L = keys.k.shape[2] if keys.seen is not None else max(keys.first, 0)
    slot = torch.arange(L, device=q.device)
    hidden = slot >= before[..., None]  # (m, B, L)
    k, v = heads(keys.k[:, :, :L], H), heads(keys.v[:, :, :L], H)
    # What is hidden may hold anything, NaN too.
    v = v.masked_fill(hidden[..., None, None], 0)
    logits = torch.einsum("msbhd,mblhd->mbhsl", heads(q, H), k) * k.shape[-1] ** -0.5
    distance = before[:, :, None, None] + torch.arange(S, device=q.device)[:, None] - slot
    logits = logits - bias(work.slopes, distance[:, :, None])
    return logits.masked_fill(hidden[:, :, None, None], -torch.inf), v


def own_logits(work: BackwardWork) -> tuple[Tensor, Tensor]:
    """Return the logits (m, B, H, S, 2S) of a tile's own persistent and temporary pairs, and v."""
    tile, H = work.buffers.attending, work.form.num_heads
    place = torch.arange(tile.q.shape[1], device=tile.q.device)
    distance = place[:, None] - place
    block = place // work.form.block_size
    persistent = block[:, None] > block
    temporary = (block[:, None] == block) & (distance >= 0)
    both = torch.cat([heads(tile.k, H), heads(tile.kt, H)], 1)
    hidden = ~torch.cat([persistent, temporary], 1)
    logits = products(heads(tile.q, H), both)
    logits = logits - bias(work.slopes, torch.cat([distance, distance], 1))
    values = torch.cat([heads(tile.v, H), heads(tile.vt, H)], 1)
    return logits.masked_fill(hidden, -torch.inf), values
