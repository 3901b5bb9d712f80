"""The positions of a call's chunks, and segments of chunks that are computed in parallel.

A chunk never crosses the border of a sequence. Chunks of SEGMENT tokens make a segment. First,
states are computed along each segment, starting from zero. Then a short pass runs along the
segments of a sequence. A kernel that reads a state adds what came from before its segment. Segments
do not depend on the batch, so the results do not depend on it either.
"""

from typing import NamedTuple

import torch
from torch import Tensor

SEGMENT = 2048
"""Tokens of a segment; one program computes its states."""


class Chunks(NamedTuple):
    """The chunks and segments of one call, for the kernels."""

    length: int
    """L, tokens of a chunk; the last chunk of a sequence may have fewer."""
    per_row: int
    """Chunks of a row; with packed sequences, the most chunks that they can have together."""
    num_rows: int
    num_sequences: int
    segments_per_row: int
    """Segments of a row; with packed sequences, the most segments that they can have together."""
    chunk_table: Tensor | None
    """Packed only: (N, 3) int32, the first token, the length and the segment of each chunk."""
    segment_table: Tensor | None
    """Packed only: (NS, 2) int32, the first chunk and the number of chunks of each segment."""
    sequence_table: Tensor | None
    """Packed only: (S, 2) int32, the first segment and the number of segments of each sequence."""

    @property
    def per_segment(self) -> int:
        """Chunks of a segment."""
        return SEGMENT // self.length

    @property
    def num_chunks(self) -> int:
        """Chunks of all rows."""
        return self.num_rows * self.per_row

    @property
    def num_segments(self) -> int:
        """Segments of all rows."""
        return self.num_rows * self.segments_per_row

    @property
    def is_split(self) -> bool:
        """Whether a sequence may have several segments."""
        return self.num_segments > self.num_rows


def place_chunks(B: int, T: int, length: int, cu_seqlens: Tensor | None) -> Chunks:
    """Compute the positions of the chunks of B rows of T tokens, or of packed sequences.

    This never waits for a GPU.
    """
    per_segment = SEGMENT // length
    if cu_seqlens is None:
        N = -(-T // length)
        return Chunks(length, N, B, B, -(-N // per_segment), None, None, None)
    S = cu_seqlens.shape[0] - 1
    N = T // length + S  # each sequence has at most one chunk with fewer tokens
    NS = N // per_segment + S
    # On a GPU nobody has checked the borders: no chunk may lie beyond the row, whatever they are.
    borders = cu_seqlens.long().clamp(0, T).cummax(0).values
    num_chunks = (borders.diff() + length - 1) // length
    num_segments = (num_chunks + per_segment - 1) // per_segment
    last_chunks, last_segments = num_chunks.cumsum(0), num_segments.cumsum(0)

    chunk = torch.arange(N, device=borders.device)
    row = torch.searchsorted(last_chunks, chunk, right=True).clamp(max=S - 1)
    in_row = chunk - (last_chunks - num_chunks)[row]
    first = borders[row] + in_row * length
    # Chunks after the last one have no tokens, so their position does not matter.
    tokens = (borders[row + 1] - first).clamp(0, length)
    of_segment = (last_segments - num_segments)[row] + in_row // per_segment
    chunks = torch.stack([first.clamp(max=T), tokens, of_segment.clamp(max=NS - 1)], 1)

    segment = torch.arange(NS, device=borders.device)
    row = torch.searchsorted(last_segments, segment, right=True).clamp(max=S - 1)
    in_row = (segment - (last_segments - num_segments)[row]) * per_segment
    count = (num_chunks[row] - in_row).clamp(0, per_segment)
    segments = torch.stack([(last_chunks - num_chunks)[row] + in_row, count], 1)
    sequences = torch.stack([last_segments - num_segments, num_segments], 1)
    return Chunks(length, N, 1, S, NS, chunks.int(), segments.int(), sequences.int())
