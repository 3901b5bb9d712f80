"""Chunks of L tokens in eager PyTorch, of plain rows or packed sequences, and states along them.

No shape depends on the lengths of packed sequences, so torch.compile can trace everything.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.positions import sequence_ids
from torch import Tensor


class PackedChunks(NamedTuple):
    """The N chunks of S packed sequences; each sequence begins a new chunk."""

    slot: Tensor
    """(T,): the place of each token among the N L places of all chunks; other places are zero."""
    owner: Tensor
    """(N,): the sequence of each chunk; chunks that no sequence needs come last."""
    opens: Tensor
    """(N,) bool: whether the chunk is the first of its sequence."""
    stop: Tensor
    """(S,): the number of chunks up to the end of each sequence."""
    empty: Tensor
    """(S,) bool: whether the sequence has no token."""


def place_packed(num_tokens: int, length: int, cu_seqlens: Tensor) -> PackedChunks:
    """Compute the positions of T // L + S chunks, enough for any lengths of packed sequences."""
    borders = cu_seqlens.long()
    sequence = sequence_ids(num_tokens, borders)
    stop = ((borders.diff() + length - 1) // length).cumsum(0)
    start = F.pad(stop, (1, 0))
    tokens = torch.arange(num_tokens, device=borders.device)
    chunks = torch.arange(num_tokens // length + stop.shape[0], device=borders.device)
    owner = torch.searchsorted(stop, chunks, right=True).clamp(max=stop.shape[0] - 1)
    return PackedChunks(
        slot=start[sequence] * length + tokens - borders[sequence],
        owner=owner,
        opens=chunks == start[owner],
        stop=stop,
        empty=borders.diff() == 0,
    )


def cut(x: Tensor, length: int, packed: PackedChunks | None) -> Tensor:
    """Cut (B, T, H, D) into chunks, (B, N, H, L, D), with zeros where there is no token."""
    if packed is None:
        x = F.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % length))
    else:
        slots = x.new_zeros(1, packed.owner.shape[0] * length, *x.shape[2:])
        x = slots.index_copy(1, packed.slot, x)
    return x.unflatten(1, (-1, length)).transpose(2, 3)


def join(chunks: Tensor, num_tokens: int, packed: PackedChunks | None) -> Tensor:
    """Undo `cut`: return (B, T, H, D) from chunks (B, N, H, L, D)."""
    x = chunks.transpose(2, 3).flatten(1, 2)
    return x[:, :num_tokens] if packed is None else x[:, packed.slot]


def carry(
    initial_state: Tensor, decays: Tensor, ends: Tensor, packed: PackedChunks | None
) -> tuple[Tensor, Tensor]:
    """Return the state before each chunk, (B, N, H, K, V), and after each sequence.

    Args:
        initial_state: (B, H, K, V), or (S, H, K, V) when packed.
        decays: (B, N, H, K, 1), the share of a state that is left after each chunk.
        ends: (B, N, H, K, V), what each chunk adds to the state.
        packed: the chunks of packed sequences; None: rows are not packed.
    """
    state, starts, stops = initial_state[: ends.shape[0]], [], []
    for n in range(ends.shape[1]):
        if packed is not None:
            first = initial_state[packed.owner[n : n + 1]]
            state = torch.where(packed.opens[n], first, state)
        starts.append(state)
        state = decays[:, n] * state + ends[:, n]
        stops.append(state)
    if packed is not None:
        last = torch.cat(stops)[(packed.stop - 1).clamp(min=0)]
        state = torch.where(packed.empty[:, None, None, None], initial_state, last)
    return torch.stack(starts, dim=1) if starts else ends, state
