"""Gated linear attention by chunks, in eager PyTorch: matrix products for any gates.

What token i wrote has decayed by exp(g[i+1] + ... + g[t]) when token t reads it. A matrix product
needs this as a factor of t times a factor of i, and the usual pair, exp(G[t]) and exp(-G[i]) with
G the running sum, overflows. So halve the chunk, and its halves, down to single tokens: a pair
i < t is parted at exactly one level, where i is in the left and t in the right half of one node.
There the decay is that from i to the end of the left half, times that from there to t: two sums of
log gates inside their own halves, never positive, and no difference of large sums is ever taken.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.positions import sequence_ids
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk, a power of two; shorter inputs take shorter chunks."""


class _Layout(NamedTuple):
    """The N chunks of S packed sequences, each of which begins a new chunk."""

    slot: Tensor
    """(T,): where each token lies among the N L slots; the other slots hold zeros."""
    owner: Tensor
    """(N,): the sequence of each chunk; chunks that none needs come last."""
    opens: Tensor
    """(N,) bool: whether the chunk is the first of its sequence."""
    stop: Tensor
    """(S,): one past the last chunk of each sequence; 0 if it has no chunk before it or itself."""
    empty: Tensor
    """(S,) bool: whether the sequence has no token."""


def chunk_gla_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    scale: float,
    initial_state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Compute what `recurrent_gla_reference` computes, chunk by chunk; T is at least 1."""
    T, H = k.shape[1], k.shape[2]
    L = min(CHUNK, 1 << (T - 1).bit_length())
    layout = None if cu_seqlens is None else _pack(T, L, cu_seqlens)
    queries, keys, values, gates = (
        _cut(x.to(initial_state.dtype), L, H, layout) for x in (q, k, v, g)
    )
    ends = (keys * _to_end(gates).exp()).mT @ values
    decays = gates.sum(-2).exp()[..., None]
    starts, final_state = _carry(initial_state, decays[:, :, :, 0], ends[:, :, :, 0], layout)
    out = (queries * gates.cumsum(-2).exp()) @ starts[:, :, :, None]
    out = out + (queries * keys).sum(-1, keepdim=True) * values
    for w in _half_widths(L):
        out = out + _between_halves(queries, keys, values, gates, w)
    out = (scale * out).permute(0, 1, 4, 2, 3, 5).flatten(1, 2).flatten(2, 3)
    out = out[:, :T] if layout is None else out[:, layout.slot]
    return out.to(q.dtype), final_state


def _half_widths(length: int) -> Iterator[int]:
    while length > 1:
        length //= 2
        yield length


def _between_halves(q: Tensor, k: Tensor, v: Tensor, g: Tensor, w: int) -> Tensor:
    """Return what tokens of right halves read from left halves, in all nodes of 2 w tokens."""
    q_right, g_right = (x.unflatten(-2, (-1, 2, w))[..., 1, :, :] for x in (q, g))
    k_left, v_left, g_left = (x.unflatten(-2, (-1, 2, w))[..., 0, :, :] for x in (k, v, g))
    scores = (q_right * g_right.cumsum(-2).exp()) @ (k_left * _to_end(g_left).exp()).mT
    return F.pad(scores @ v_left, (0, 0, w, 0)).flatten(-3, -2)


def _to_end(g: Tensor) -> Tensor:
    """Return g[i+1] + ... + g[L-1] for each token i of (..., L, K)."""
    later = g[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return F.pad(later, (0, 0, 0, 1))


def _cut(x: Tensor, L: int, num_heads: int, layout: _Layout | None) -> Tensor:
    """Cut (B, T, H or HQ, D) into chunks, (B, N, H, 1 or HQ // H, L, D)."""
    if layout is None:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % L))
    else:
        slots = x.new_zeros(1, layout.owner.shape[0] * L, *x.shape[2:])
        x = slots.index_copy(1, layout.slot, x)
    return x.unflatten(2, (num_heads, -1)).unflatten(1, (-1, L)).permute(0, 1, 3, 4, 2, 5)


def _carry(
    initial_state: Tensor, decays: Tensor, ends: Tensor, layout: _Layout | None
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, (B, N, H, K, V), and after each sequence."""
    N = ends.shape[1]
    state, starts, stops = initial_state[: ends.shape[0]], [], []
    for n in range(N):
        if layout is not None:
            first = initial_state[layout.owner[n : n + 1]]
            state = torch.where(layout.opens[n], first, state)
        starts.append(state)
        state = decays[:, n] * state + ends[:, n]
        stops.append(state)
    if layout is not None:
        last = torch.cat(stops)[(layout.stop - 1).clamp(min=0)]
        state = torch.where(layout.empty[:, None, None, None], initial_state, last)
    return torch.stack(starts, dim=1), state


def _pack(num_tokens: int, L: int, cu_seqlens: Tensor) -> _Layout:
    """Lay out T // L + S chunks, enough for any lengths, so that no shape depends on them."""
    borders = cu_seqlens.long()
    sequence = sequence_ids(num_tokens, borders)
    stop = ((borders.diff() + L - 1) // L).cumsum(0)
    start = F.pad(stop, (1, 0))
    tokens = torch.arange(num_tokens, device=borders.device)
    chunks = torch.arange(num_tokens // L + stop.shape[0], device=borders.device)
    owner = torch.searchsorted(stop, chunks, right=True).clamp(max=stop.shape[0] - 1)
    return _Layout(
        slot=start[sequence] * L + tokens - borders[sequence],
        owner=owner,
        opens=chunks == start[owner],
        stop=stop,
        empty=borders.diff() == 0,
    )
