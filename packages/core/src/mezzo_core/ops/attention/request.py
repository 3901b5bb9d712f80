"""What every backend is asked and answers, and what the features of a request mean."""

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_core.positions import sequence_ids


class AttentionOutput(NamedTuple):
    """Result of attention.

    Attributes:
        out: (B, T, HQ, V) in the dtype of q.
        lse: (B, T, HQ) natural log of the sum of exponentials of the scores, float32 (float64 for
            float64 inputs), or None if it was not asked for.
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


def has_empty_rows(r: Request) -> bool:
    """Tell whether a query could have no key to attend to, from shapes alone."""
    return r.q_positions is not None or r.q.shape[1] != r.k.shape[1]


def token_positions(r: Request) -> tuple[Tensor, Tensor]:
    """Return the positions of queries (B or 1, T) and keys (B or 1, S)."""
    if r.q_positions is not None and r.k_positions is not None:
        return r.q_positions, r.k_positions
    device = r.q.device
    return (
        torch.arange(r.q.shape[1], device=device)[None],
        torch.arange(r.k.shape[1], device=device)[None],
    )


def visible_keys(r: Request) -> Tensor:
    """Return (B or 1, T, S) bool: whether query t attends to key s."""
    q_pos, k_pos = token_positions(r)
    distance = q_pos[:, :, None] - k_pos[:, None, :]
    visible = (k_pos >= 0)[:, None, :].expand_as(distance)
    if r.causal:
        visible = visible & (distance >= 0)
    if r.window_size is not None:
        visible = visible & (distance < r.window_size)
    if r.cu_seqlens is not None:
        ids = sequence_ids(r.q.shape[1], r.cu_seqlens)
        visible = visible & (ids[:, None] == ids[None, :])
    return visible


def alibi_bias(r: Request, slopes: Tensor) -> Tensor:
    """Return (B or 1, HQ, T, S), -slope * |distance| in the dtype of the slopes."""
    q_pos, k_pos = token_positions(r)
    distance = (q_pos[:, :, None] - k_pos[:, None, :]).abs()
    return -slopes[:, None, None] * distance[:, None]
