"""Who reads each chunk: the lists by which gradients of keys and values are summed in order."""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.checks import can_look, check_size
from mezzo_core.ops.shapes import Shapes
from torch import Tensor

_INDICES = Shapes(indices="int64: B N R")


class Readers(NamedTuple):
    """The reads of each chunk, split into parts of at most `size` reads.

    A read is one entry of the indices (B, N, R), a chunk one of B S. Of a chunk's parts all but the
    last are early: their sums are stored, and the last part adds them up. Only values depend on
    which chunks are read, never shapes, so that nothing waits for the GPU.
    """

    order: Tensor
    """(B N R,) int32: all reads, sorted by the chunk that is read, and then by place."""
    offsets: Tensor
    """(B S + 1,) int64: chunk c has the reads `order[offsets[c] : offsets[c + 1]]`."""
    parts: Tensor
    """(B S + 1,) int64: chunk c has the early parts from `parts[c]` to `parts[c + 1]`."""
    chunks: Tensor
    """(early parts at most,) int64: the chunk of each early part, B S if there is no such part."""
    size: int
    """Reads of an early part; the last part has 1 to `size`, or none if the chunk is not read."""


def readers_of(indices: Tensor, S: int) -> Readers:
    """List the readers of S chunks in each row of the indices (B, N, R).

    Raises:
        TypeError: if the indices are no int64 tensor, or S is no int.
        ValueError: if an index is not from -1 to S - 1 (on a CPU), or a shape is another.
    """
    check_size("readers_of", "S", S, 0)
    check_indices("readers_of", indices, S)
    B, _, R = indices.shape
    size = part_size(R)
    rows = torch.arange(B, device=indices.device)[:, None, None]
    chunk = torch.where(indices >= 0, indices + rows * S, B * S).flatten()
    chunk, order = chunk.to(torch.int32).sort(stable=True)  # which sorts faster than int64
    borders = torch.arange(B * S + 1, dtype=torch.int32, device=indices.device)
    offsets = torch.searchsorted(chunk, borders)
    early = (offsets.diff() - 1).clamp(min=0) // size
    # Not `parts[1:]`: compiled for a GPU, torch's searchsorted forgets where a view begins
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
    """Return the reads of an early part if every chunk reads R others.

    A chunk is read R times on average, so few have early parts: these fill at most half of what
    keys and values do.
    """
    return max(16, 2 * R)
