"""The positions of the chunks in a call, described alike for plain, packed and continued rows."""

from typing import NamedTuple

import torch
from mezzo_core.ops.packed import check_borders
from mezzo_core.positions import sequence_ids
from torch import Tensor

from mezzo_rat.ops.divide import floor_divide


class Chunks(NamedTuple):
    """The slots of N chunks, and the tokens in them. A first axis of 1 is shared by all rows."""

    slot: Tensor
    """(1 or B, T) int64: the slot of each token's chunk."""
    first: Tensor | None
    """(1, T) int64: the slot of the first chunk of each token's sequence; None: slot 0."""
    end: Tensor
    """(1 or B, N) int64: the last token of each chunk in this call."""
    changed: Tensor | None
    """(B, N) bool: whether this call changes the end of the chunk; None: it changes all ends."""
    chunk: Tensor
    """(1 or B, T) int64: the index of each token's chunk in its own sequence."""
    position: Tensor
    """(1 or B, T) int64: the position of each token in its own sequence."""


def plain_chunks(num_tokens: int, chunk_size: int, device: torch.device) -> Chunks:
    """Find the chunks of rows that start with their first token; the last chunk may be short."""
    position = torch.arange(num_tokens, device=device)[None]
    chunk = floor_divide(position, chunk_size)
    ends = torch.arange(-(-num_tokens // chunk_size), device=device)[None] * chunk_size
    end = (ends + chunk_size - 1).clamp(max=num_tokens - 1)
    return Chunks(chunk, None, end, None, chunk, position)


def packed_chunks(num_tokens: int, chunk_size: int, cu_seqlens: Tensor) -> Chunks:
    """Find the chunks of one row of packed sequences; each sequence begins a new chunk.

    There are T // L + S slots, which is enough for any lengths. So no shape depends on the lengths.

    Raises:
        ValueError: if the borders do not run from 0 to T, or decrease. This is checked on the CPU
            only, as reading the values would wait for a GPU.
    """
    check_borders("chunk_rat_attention", cu_seqlens, num_tokens)
    borders = cu_seqlens.long()
    sequence = sequence_ids(num_tokens, borders)
    position = torch.arange(num_tokens, device=borders.device) - borders[sequence]
    chunk = floor_divide(position, chunk_size)
    num_chunks = floor_divide(borders.diff() + chunk_size - 1, chunk_size)
    first = (num_chunks.cumsum(0) - num_chunks)[sequence]
    slot = first + chunk
    slots = torch.arange(num_tokens // chunk_size + num_chunks.shape[0], device=slot.device)
    end = (torch.searchsorted(slot, slots, right=True) - 1).clamp(min=0)
    return Chunks(slot[None], first[None], end[None], None, chunk[None], position[None])


def continued_chunks(
    num_tokens: int, chunk_size: int, num_slots: int, start: Tensor, lengths: Tensor
) -> Chunks:
    """Find the chunks of rows that have seen `start` (B,) tokens and get `lengths` (B,) more."""
    position = start[:, None] + torch.arange(num_tokens, device=start.device)
    chunk = floor_divide(position, chunk_size)
    borders = torch.arange(1, num_slots + 1, device=start.device) * chunk_size
    end = torch.minimum(borders, (start + lengths)[:, None]) - 1 - start[:, None]
    return Chunks(chunk, None, end.clamp(min=0), end >= 0, chunk, position)
