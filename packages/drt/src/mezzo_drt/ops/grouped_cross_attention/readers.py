"""Lists who reads each chunk, so that its gradients are summed in a fixed order."""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.checks import can_look, check_size
from mezzo_core.ops.shapes import Shapes
from torch import Tensor

_INDICES = Shapes(indices="int64: B N R")


class Readers(NamedTuple):
    """The reads of each chunk, split into parts of at most `size` reads.

    A read is one entry of the indices (B, N, R); chunks are numbered from 0 to B S - 1. All parts
    of a chunk but the last are *early*: their sums are stored, and the last part adds them up. No
    shape depends on the values of indices, so nothing waits for the GPU.
    """

    order: Tensor
    """(B N R,) int32: all reads, sorted by the chunk that is read, then by their place."""
    offsets: Tensor
    """(B S + 1,) int64: chunk c has the reads `order[offsets[c] : offsets[c + 1]]`."""
    parts: Tensor
    """(B S + 1,) int64: chunk c has the early parts `parts[c]` to `parts[c + 1]` (exclusive)."""
    chunks: Tensor
    """(most early parts,) int64: the chunk of each early part; B S if there are fewer parts."""
    size: int
    """Reads in an early part; the last part has 1 to `size`, or none if the chunk is not read."""


def readers_of(indices: Tensor, S: int) -> Readers:
    """List the readers of S chunks in each row of the indices (B, N, R).

    Raises:
        TypeError: if the indices are no int64 tensor, or S is no int.
        ValueError: if a shape is wrong or, on a CPU, an index is not from -1 to S - 1.
    """
    check_size("readers_of", "S", S, 0)
    check_indices("readers_of", indices, S)
    B, _, R = indices.shape
    size = part_size(R)
    rows = torch.arange(B, device=indices.device)[:, None, None]
    chunk = torch.where(indices >= 0, indices + rows * S, B * S).flatten()
    chunk, order = chunk.to(torch.int32).sort(stable=True)  # int32 sorts faster than int64
    borders = torch.arange(B * S + 1, dtype=torch.int32, device=indices.device)
    offsets = torch.searchsorted(chunk, borders)
    early = (offsets.diff() - 1).clamp(min=0) // size
    # Not the view `parts[1:]`: compiled for a GPU, torch's searchsorted ignores its offset
    # (pytorch/pytorch#182343).
    ends = early.cumsum(0)
    parts = torch.nn.functional.pad(ends, (1, 0))
    most = torch.arange(max(0, indices.numel() - 1) // size, device=indices.device)
    chunks = torch.searchsorted(ends, most, right=True)
    return Readers(order.to(torch.int32), offsets, parts, chunks, size)


def check_indices(op: str, indices: Any, S: int) -> None:
    """Check indices (B, N, R) of S chunks; raises as `readers_of` does."""
    _INDICES.check(op, indices)
    if can_look(indices):
        wrong = indices[(indices < -1) | (indices >= S)]
        if wrong.numel() > 0:
            raise ValueError(
                f"{op}: indices must be from -1 to S - 1 = {S - 1}, got {int(wrong[0])}"
            )


def part_size(R: int) -> int:
    """Return the reads in an early part if every chunk reads R others.

    A chunk is read R times on average, so few chunks have early parts. Their sums take at most half
    the memory of keys and values.
    """
    return max(16, 2 * R)
