"""Retrieval: chooses the past chunks that a chunk reads, and their weights (section 3.1)."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.ops.precision import accumulation_dtype, without_autocast
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

TILE_KEYS = 16_384
"""Chunks that are scored at a time."""
TILE_SCORES = 2**24
"""Scores in memory at a time."""


class Reads(NamedTuple):
    """What each chunk reads.

    Attributes:
        indices: (B, N, R) int64, the chunks; -1 for none.
        weights: (B, N, R) float32 (float64 for float64), which sum to 1 over the chunks that are
            read, and are 0 elsewhere.
    """

    indices: Tensor
    weights: Tensor


def retrieve(
    queries: Tensor,
    keys: Tensor,
    lo: Tensor,
    hi: Tensor,
    num_retrieved: int,
    *,
    noise: bool,
    random_group: int | None = None,
) -> Reads:
    """Choose the chunks j with the R largest scores r, and weigh them by the softmax of r.

        r[n, j] = q_n · key_j / sqrt(C),    lo_n <= j < hi_n

    Gradients flow through the weights, to the queries and to the keys that are chosen. The scores
    are never all in memory.

    Args:
        queries: (B, N, C), one for each chunk that reads.
        keys: (B, S, C), one for each chunk that can be read.
        lo: (B or 1, N), the first chunk that each may read.
        hi: (B or 1, N), one more than the last; `hi <= lo` for nothing.
        num_retrieved: R.
        noise: choose by r + Gumbel noise (of torch's global generator): this samples chunks without
            replacement, with probabilities proportional to exp(r). The weights do not change.
        random_group: if given, ignore r when choosing: with `noise` choose at random, else by fixed
            pseudo-random numbers, different for each group. The numbers depend only on how many
            chunks may be read, so they are the same in any segmentation of a sequence; of equal
            numbers the earliest chunk is taken.
    """
    lo, hi = (x.expand(queries.shape[0], -1) for x in (lo, hi))
    with torch.no_grad():
        indices = _choose(queries, keys, lo, hi, num_retrieved, noise, random_group)
    return Reads(indices, _weigh(queries, keys, indices))


def after_first(found: Reads, first: Reads | None = None) -> Reads:
    """Put the reads of the first chunk before those of the others; None if it reads nothing."""
    if first is None:
        return Reads(
            F.pad(found.indices, (0, 0, 1, 0), value=-1), F.pad(found.weights, (0, 0, 1, 0))
        )
    return Reads(*(torch.cat(parts, 1) for parts in zip(first, found, strict=True)))


def _choose(
    queries: Tensor,
    keys: Tensor,
    lo: Tensor,
    hi: Tensor,
    num_retrieved: int,
    noise: bool,
    random_group: int | None,
) -> Tensor:
    """Return (B, N, R), the chosen chunks, -1 where there are fewer; computed tile by tile."""
    (B, N), S, R = queries.shape[:2], keys.shape[1], num_retrieved
    rows = max(1, TILE_SCORES // max(1, B * min(S, TILE_KEYS)))
    largest = torch.topk if random_group is None else _earliest_largest
    found = []
    # torch.compile unrolls the loop. Counting tiles, not rows, makes it one graph per tile count.
    for i in range(ceil_div(N, rows)):
        piece = slice(i * rows, (i + 1) * rows)
        q, b_lo, b_hi = queries[:, piece], lo[:, piece, None], hi[:, piece, None]
        dtype = accumulation_dtype(q.dtype)
        best = q.new_full((B, q.shape[1], R), float("-inf"), dtype=dtype)
        index = torch.full_like(best, -1, dtype=torch.int64)
        for b in (TILE_KEYS * j for j in range(ceil_div(S, TILE_KEYS))):
            tile = keys[:, b : b + TILE_KEYS]
            chunk = torch.arange(b, b + tile.shape[1], device=q.device)
            if random_group is None:
                scores = _products(q, tile)
            elif noise:
                scores = q.new_zeros(B, q.shape[1], tile.shape[1], dtype=dtype)
            else:
                scores = _random_numbers(b_hi - b_lo, chunk - b_lo, random_group).to(dtype)
            if noise:  # -log of an exponential variable is a Gumbel variable
                scores = scores - torch.empty_like(scores).exponential_().log()
            scores = scores.masked_fill((chunk < b_lo) | (chunk >= b_hi), float("-inf"))
            top, place = largest(scores, min(R, tile.shape[1]))
            top, index = torch.cat([best, top], -1), torch.cat([index, place + b], -1)
            best, place = largest(top, R)
            index = index.gather(-1, place)
        found.append(index.masked_fill(best == float("-inf"), -1))
    return torch.cat(found, 1) if found else lo.new_empty(B, 0, R)


def _products(q: Tensor, keys: Tensor) -> Tensor:
    """Return (B, N, S) scores in float32, because in bf16 the best of many chunks would tie."""
    dtype = accumulation_dtype(q.dtype)
    with without_autocast(q.device):
        return q.to(dtype) @ keys.to(dtype).transpose(1, 2) * q.shape[-1] ** -0.5


def _earliest_largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Do `topk` along the last axis; of equal values take the earliest, as `topk` need not do."""
    S = x.shape[-1]
    least = x.topk(count, -1).values[..., -1:]
    early = torch.arange(S, 0, -1, device=x.device)
    order = torch.where(x > least, S, 0) + torch.where(x >= least, early, 0)
    place = order.topk(count, -1).indices
    values, by_value = x.gather(-1, place).sort(dim=-1, descending=True, stable=True)
    return values, place.gather(-1, by_value)


def _weigh(queries: Tensor, keys: Tensor, indices: Tensor) -> Tensor:
    """Return (B, N, R), the softmax of r over the chosen chunks; 0 for none."""
    is_read, dtype = indices >= 0, accumulation_dtype(queries.dtype)
    if keys.shape[1] == 0:
        return queries.new_zeros(indices.shape, dtype=dtype)
    rows = torch.arange(keys.shape[0], device=keys.device)[:, None, None]
    chosen = keys[rows, indices.clamp(min=0)].to(dtype)  # (B, N, R, C)
    chosen = chosen.masked_fill(~is_read[..., None], 0)  # chunks not read may hold anything
    r = (queries.to(dtype)[:, :, None] * chosen).sum(-1) * queries.shape[-1] ** -0.5
    # A chunk that reads nothing gets finite scores, since a softmax of -inf is NaN, and weights 0.
    has_none = ~is_read.any(-1, keepdim=True)
    r = r.masked_fill(~is_read & ~has_none, float("-inf")).masked_fill(has_none, 0)
    return F.softmax(r, -1).masked_fill(~is_read, 0)


def _random_numbers(n: Tensor, j: Tensor, group: int) -> Tensor:
    """Hash n (B, N, 1), j (B, N, S) and the group to numbers in [0, 1), (B, N, S)."""
    mixed = n * 1_000_003 + j * 7_919 + group * 104_729
    for shift, factor in ((15, 0x2C1B3C6D), (12, 0x297A2D39)):
        mixed = ((mixed ^ (mixed >> shift)) * factor) & 0x7FFFFFFF
    return ((mixed >> 7) & 0xFFFFFF).float() / 2**24
