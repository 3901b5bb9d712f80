"""The tiled schedule of the paper's Algorithm 1, as a list of tiles and as a forward in PyTorch.

The algorithm runs here as in the paper: eager PyTorch without kernels of its own, a few launches
for each token. Our own op is compared with it, and tests count its loads and launches.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_recurrent_transformer.block import RecurrentBlock


class Tile(NamedTuple):
    """Persistent pairs that a token completes, and the queries that attend to them at once."""

    keys: range
    queries: range


def tiles(num_tokens: int) -> Iterator[Tile]:
    """Yield the tile after each token but the last; positions start at 0.

    After t tokens its side is the largest power of two that divides t.
    """
    for t in range(1, num_tokens):
        side = t & -t
        yield Tile(range(t - side, t), range(t, min(t + side, num_tokens)))


class Softmax(NamedTuple):
    """A softmax-weighted sum for each query while it is being accumulated, position first."""

    m: Tensor  # (T, B, H), the highest logit so far
    l: Tensor  # noqa: E741 - the paper's letter; (T, B, H), the sum of exp(logit - m)
    o: Tensor  # (T, B, H, D), the sum of exp(logit - m) v


@torch.no_grad()
def tiled_forward(block: RecurrentBlock, x: Tensor) -> Tensor:
    """Compute a layer of block_size 1 by Algorithm 1, (B, T, C) to (B, T, C), without gradients.

    The temporary pairs of all tokens are folded in at the start, since they need x alone.
    """
    T, config, slopes = x.shape[1], block.config, block.slopes()
    heads = (block.num_heads, config.head_dim)
    x = x.transpose(0, 1).contiguous()
    normal = block.attention_norm(x)
    q = block.q_norm(block.wq(normal)).unflatten(-1, heads) * config.head_dim**-0.5
    k = block.k_norm(block.wk(normal)).unflatten(-1, heads)
    v = block.wv(normal).unflatten(-1, heads)
    high = torch.promote_types(x.dtype, torch.float32)
    logits = (q * k).sum(-1, dtype=high)
    sums = Softmax(logits, torch.ones_like(logits), v.to(high, copy=True))
    z = torch.empty_like(x)
    after = {tile.keys.stop: tile for tile in tiles(T)}
    for t in range(T):
        attended = (sums.o[t] / sums.l[t][..., None]).to(x.dtype).flatten(-2)
        h = x[t] + config.residual_scale * block.wo(attended)
        z[t] = h + config.residual_scale * block.mlp(block.mlp_norm(h))
        made = block.attention_norm(z[t]) if config.persistent_norm else z[t]
        # The persistent pair takes the place of the temporary one, which nothing needs any more.
        k[t] = block.k_norm(block.wk(made)).unflatten(-1, heads)
        v[t] = block.wv(made).unflatten(-1, heads)
        if tile := after.get(t + 1):
            fold(sums, tile, q, k, v, slopes)
    return z.transpose(0, 1)


def fold(sums: Softmax, tile: Tile, q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> None:
    """Add a tile of keys and values to the sums of its queries, in place (UpdateTile).

    q, k and v are (T, B, H, D), q scaled; slopes (H,) are ALiBi's.
    """
    rows, keys = (slice(part.start, part.stop) for part in (tile.queries, tile.keys))
    m, total, o = sums.m[rows], sums.l[rows], sums.o[rows]
    places = [torch.arange(part.start, part.stop, device=q.device) for part in (rows, keys)]
    distance = (places[0][:, None] - places[1]).to(m.dtype)
    logits = torch.einsum("qbhd,kbhd->qbhk", q[rows], k[keys]).to(m.dtype)
    logits = logits - slopes.to(m.dtype)[:, None] * distance[:, None, None]
    highest = torch.maximum(m, logits.amax(-1))
    weights, kept = torch.exp(logits - highest[..., None]), torch.exp(m - highest)
    added = torch.einsum("qbhk,kbhd->qbhd", weights.to(v.dtype), v[keys])
    m.copy_(highest)
    total.mul_(kept).add_(weights.sum(-1))
    o.mul_(kept[..., None]).add_(added)
