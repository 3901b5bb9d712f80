"""From raw scores s to what GSA's recurrence takes: a running log-sum-exp, gates and strengths."""

from typing import Any, Literal, get_args

import torch
from mezzo_core.ops.scan import linear_scan
from mezzo_core.positions import sequence_ids, sequence_positions
from torch import Tensor
from torch.nn import functional as F

Reading = Literal["text", "code"]

SHORT = 128
"""Packed rows of up to this many tokens are summed in the same steps, so that torch.compile makes
one graph for all of them; longer rows have a graph for each power of two."""

MIN_LOG_GATE = -30.0
"""Replaces log(0) at a sequence's first token: exp(-30) is negligible beside one."""


def check_reading(op: str, reading: Any) -> None:
    """Raise a ValueError if the paper has no such reading."""
    if reading not in get_args(Reading):
        raise ValueError(f'{op}: reading must be "text" or "code", got {reading!r}')


def gates_and_strengths(
    s: Tensor, before: Tensor, z: Tensor, reading: Reading
) -> tuple[Tensor | None, Tensor | None]:
    """Return g and s of GSA's ops, each None where these have a default for it.

    Args:
        s: (..., H, M) raw scores.
        before: (..., H, M), z[t-1].
        z: (..., H, M), z[t], the log of the sum of exp(s).
        reading: see `chunk_abc`.
    """
    written = s > float("-inf")
    if reading == "text":
        return None, torch.exp(s - z.masked_fill(~written, 0.0))
    # exp(z[t-1] - z[t]) = sigmoid(z[t-1] - s[t]). z[t-1] - z[t] itself is a difference of nearly
    # equal sums, which would lose the contribution of a late token.
    margin = torch.where(written, before - s, float("inf"))
    return F.logsigmoid(margin).clamp(min=MIN_LOG_GATE), None


def running_lse(
    s: Tensor, z0: Tensor, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute z[t] = log(exp(z0) + Σ_{j≤t} exp(s[j])) for every token. Differentiable.

    Args:
        s: (B, T, ...).
        z0: (B, ...), z before the first token, or (S, ...) when packed; -inf for an empty sum.
        cu_seqlens: (S + 1,) borders of packed sequences.

    Returns:
        z[t-1] and z[t], (B, T, ...), and z after the last token of each sequence, like z0.
    """
    if cu_seqlens is not None:
        return _packed_lse(s, z0, cu_seqlens)
    # Sum exp(s - top), where top is the largest score so far: no factor is above 1. The gradient
    # of torch.logcumsumexp would lose digits where scores are large, by differences of logarithms.
    scores = torch.cat([z0[:, None], s], dim=1)
    top = scores.detach().cummax(1).values.clamp(min=torch.finfo(s.dtype).min)
    terms = torch.exp(scores - top)
    sums = linear_scan(
        torch.exp(top[:, :-1] - top[:, 1:]), terms[:, 1:], initial_state=terms[:, 0]
    ).out
    some = sums > 0
    z = torch.where(some, top[:, 1:] + sums.where(some, 1.0).log(), float("-inf"))
    borders = torch.cat([z0[:, None], z], dim=1)
    return borders[:, : z.shape[1]], z, borders[:, -1].clone()  # a view would keep all tokens


def _packed_lse(s: Tensor, z0: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Do what `running_lse` does for packed sequences, by doubling.

    After the step of width d, each z is the sum over the last 2d tokens of its sequence. Taking
    differences of one sum over the whole row would lose digits, and a loop over the sequences would
    have to wait for the GPU to read their borders.
    """
    T, axes = s.shape[1], [1] * (s.ndim - 2)
    place = sequence_positions(T, cu_seqlens).to(s.device).view(1, T, *axes)
    z, width = s, 1
    while width < max(T, SHORT):
        # Selected before the sum too: else a NaN of another sequence would reach the gradients.
        earlier = torch.where(place >= width, z.roll(width, dims=1), z)
        z = torch.where(place >= width, torch.logaddexp(z, earlier), z)
        width *= 2
    first = z0[sequence_ids(T, cu_seqlens)][None]
    z = torch.logaddexp(first, z)
    before = torch.where(place > 0, z.roll(1, dims=1), first)
    # A token in front, so that a sequence without tokens at the row's start has one to look up.
    last = torch.cat([z.new_zeros(1, 1, *s.shape[2:]), z], dim=1)[0, cu_seqlens[1:].long()]
    return before, z, torch.where(cu_seqlens.diff().view(-1, *axes) > 0, last, z0)
