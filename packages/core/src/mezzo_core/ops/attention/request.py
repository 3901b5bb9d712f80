"""The arguments and results that all backends share, and the masks that a request means."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_core.ops.checks import can_look
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import sequence_ids

WILD = 2.0**56
"""Sums of products of numbers below this stay far from the largest float32, 2^128."""


class AttentionOutput(NamedTuple):
    """Result of attention.

    Attributes:
        out: (B, T, HQ, V) in the dtype of q.
        lse: (B, T, HQ) natural log of the sum of exponentials of the scores, float32 (float64 for
            float64 inputs), or None without `return_lse`.
    """

    out: Tensor
    lse: Tensor | None


class Request(NamedTuple):
    """Checked arguments of `attention`, with the scale filled in."""

    q: Tensor
    k: Tensor
    v: Tensor
    causal: bool
    window_size: int | None
    slopes: Tensor | None
    scale: float
    cu_seqlens: Tensor | None
    q_positions: Tensor | None
    k_positions: Tensor | None
    return_lse: bool


def is_plain(r: Request) -> bool:
    """Tell whether the request is causal or full attention and nothing else."""
    features = (r.window_size, r.slopes, r.cu_seqlens, r.q_positions)
    return not r.return_lse and all(feature is None for feature in features)


def token_positions(r: Request) -> tuple[Tensor, Tensor]:
    """Return the positions of queries (B or 1, T) and keys (B or 1, S), int64."""
    if r.q_positions is not None and r.k_positions is not None:
        return r.q_positions.long(), r.k_positions.long()
    device = r.q.device
    return (
        torch.arange(r.q.shape[1], device=device)[None],
        torch.arange(r.k.shape[1], device=device)[None],
    )


def visible_keys(r: Request) -> Tensor:
    """Return (B or 1, T, S) bool: whether query t attends to key s."""
    q_pos, k_pos = token_positions(r)
    q_pos, k_pos = q_pos[:, :, None], k_pos[:, None, :]
    visible = (k_pos >= 0).expand(-1, q_pos.shape[1], -1)
    if r.causal:
        visible = visible & (k_pos <= q_pos)
    if r.window_size is not None:
        # Compare no distances: they may overflow. Visible keys have no negative positions, so
        # clamping a query's position at 0 changes nothing.
        visible = visible & (k_pos > q_pos.clamp(min=0) - r.window_size)
    if r.cu_seqlens is not None:
        ids = sequence_ids(r.q.shape[1], r.cu_seqlens)
        visible = visible & (ids[:, None] == ids[None, :])
    return visible


def seen_interval(
    tokens: Tensor,
    num_keys: int,
    causal: bool,
    window_size: int | None,
    cu_seqlens: Tensor | None,
    ids: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the first and the last key that each query sees, for a request without positions.

    Both are (T,) int64 and never decrease. A query with first > last sees no key.

    Args:
        tokens: 0..T-1, the queries.
        num_keys: S.
        causal: as in `attention`.
        window_size: as in `attention`.
        cu_seqlens: as in `attention`.
        ids: (T,), the packed sequence of each token, given with `cu_seqlens`.
    """
    first, last = torch.zeros_like(tokens), torch.full_like(tokens, num_keys - 1)
    if cu_seqlens is not None and ids is not None:
        borders = cu_seqlens.to(torch.int64)
        first = borders[ids]
        last = borders[(ids + 1).clamp(max=borders.shape[0] - 1)] - 1
    if causal:
        last = tokens
    if window_size is not None:
        first = torch.maximum(first, tokens - window_size + 1)
    return first, last


def lost_tokens(*tensors: Tensor) -> Tensor | None:
    """Return (B, S) bool: which tokens of (B, S, H, D) tensors hold a NaN or an infinity.

    A query gives tokens that it does not see the weight 0, but 0 * NaN is NaN. So backends replace
    such tokens by zeros, and write NaN into the results of the queries that see them. Eager calls
    on a CPU return None if there is no such token. Elsewhere the look would wait for the GPU or
    break a compiled graph.
    """
    if can_look(*tensors):
        # If a sum is finite, all its terms are; and it reads the memory only once.
        sums = [x.detach().sum(dtype=accumulation_dtype(x.dtype)) for x in tensors]
        if all(total.isfinite() for total in sums):
            return None
    return wild_tokens(*tensors, limit=math.inf)


def is_tame(*tensors: Tensor) -> bool:
    """Tell whether all values are below `WILD`, so that no product of two of them overflows."""
    ends = [end for x in tensors if x.numel() for end in x.detach().aminmax()]
    return all(abs(float(end)) < WILD for end in ends)  # False for NaN


def wild_tokens(*tensors: Tensor, limit: float = WILD) -> Tensor:
    """Return (B, S) bool: which tokens of (B, S, H, D) tensors hold a NaN or a size >= `limit`."""
    tame = [(x.detach().abs() < limit).flatten(2).all(-1) for x in tensors]
    return ~torch.stack(tame).all(0)


def alibi_bias(r: Request, slopes: Tensor) -> Tensor:
    """Return (B or 1, HQ, T, S), -slope * |distance| in the dtype of the slopes."""
    q_pos, k_pos = token_positions(r)
    distance = (q_pos[:, :, None] - k_pos[:, None, :]).abs()
    return -slopes[:, None, None] * distance[:, None]
