"""Where tokens and landmarks stand: a chunk is L tokens and then a landmark, L + 1 places.

A *place* counts tokens and landmarks alike: token t of a sequence is at place t + t // L, and chunk
n begins at place n (L + 1). Layers run over places. Encoder and cross-attention need whole chunks,
so the places of a call are also laid out on a grid of N chunks of L + 1 places each.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.positions import sequence_ids
from torch import Tensor


class Places(NamedTuple):
    """The places of one call: P a row, on a grid of N chunks.

    Attributes:
        chunk_size: L.
        num_tokens: T, the tokens of the call.
        num_chunks: N.
        num_places: P.
        lo: (B or 1, N), for each chunk of the grid the first chunk that the chunk after it may
            read. Chunks are numbered as in the memory.
        hi: likewise, one more than the last; `hi <= lo` if there is none.
        source: (B or 1, P), which token is at each place; T for a landmark, T + 1 for padding. None
            if every row begins with a chunk, so that all places are regular.
        tokens: (B or 1, T), the place of each token; None likewise.
        shift: where in a chunk the first place is, if this is the same in all rows.
        shifts: (B,), the same if rows differ, else None.
        cu_seqlens: borders of packed sequences, in places; padding is one more sequence at the end.
        lengths: (B,), the real places of each row; None if all are real, or it does not matter.
    """

    chunk_size: int
    num_tokens: int
    num_chunks: int
    num_places: int
    lo: Tensor
    hi: Tensor
    source: Tensor | None = None
    tokens: Tensor | None = None
    shift: int = 0
    shifts: Tensor | None = None
    cu_seqlens: Tensor | None = None
    lengths: Tensor | None = None

    def spread(self, x: Tensor, landmark: Tensor) -> Tensor:
        """Put landmarks (1, C) between tokens, and zeros into padding: (B, T, C) to (B, P, C)."""
        landmark = landmark.to(x.dtype)
        if self.source is None:
            N, L = self.num_chunks, self.chunk_size
            chunks = F.pad(x, (0, 0, 0, N * L - self.num_tokens)).unflatten(1, (N, L))
            return torch.cat([chunks, landmark.expand(x.shape[0], N, -1, -1)], 2).flatten(1, 2)
        # Insert landmarks by `where`: its gradient is a sum, while that of a gather uses atomics.
        tokens = take(F.pad(x, (0, 0, 0, 2)), self.source)
        return torch.where((self.source == self.num_tokens)[..., None], landmark, tokens)

    def collect(self, y: Tensor) -> Tensor:
        """Drop landmarks and padding: (B, P, C) to (B, T, C)."""
        if self.tokens is None:
            chunks = self.to_chunks(y)[:, :, : self.chunk_size]
            return chunks.flatten(1, 2)[:, : self.num_tokens]
        return take(y, self.tokens)

    def to_chunks(self, x: Tensor) -> Tensor:
        """Lay places out on the grid: (B, P, ...) to (B, N, L + 1, ...).

        Places of the grid that are not in the call get any values of x, or zeros.
        """
        size = self.num_chunks * (self.chunk_size + 1)
        if self.shifts is not None:
            index = torch.arange(size, device=x.device) - self.shifts[:, None]
            x = take(x, index.clamp(0, self.num_places - 1))
        elif size > self.num_places:
            after = size - self.num_places - self.shift
            x = F.pad(x, (0, 0) * (x.ndim - 2) + (self.shift, after))
        return x.unflatten(1, (self.num_chunks, -1))

    def from_chunks(self, x: Tensor) -> Tensor:
        """Undo `to_chunks`: (B, N, L + 1, ...) to (B, P, ...)."""
        x = x.flatten(1, 2)
        if self.shifts is None:
            return x[:, self.shift : self.shift + self.num_places]
        index = torch.arange(self.num_places, device=x.device) + self.shifts[:, None]
        return take(x, index.clamp(max=x.shape[1] - 1))

    def from_chunk(self, n: int) -> "Places":
        """Return the places from chunk n of the grid on, for rows with the same `shift`.

        Earlier tokens get a negative place.
        """
        first = n * (self.chunk_size + 1) - self.shift
        return self._replace(
            num_chunks=self.num_chunks - n,
            num_places=self.num_places - first,
            lo=self.lo[:, n:],
            hi=self.hi[:, n:],
            source=None if self.source is None else self.source[:, first:],
            tokens=None if self.tokens is None else self.tokens - first,
            shift=0,
        )

    def landmarks(self, x: Tensor) -> Tensor:
        """Take each chunk's landmark: (B, P, C) to (B, N, C).

        A chunk whose landmark is not in the call gets another place, or 0.
        """
        return self.to_chunks(x)[:, :, -1]


def take(x: Tensor, index: Tensor) -> Tensor:
    """Gather along axis 1: x (B, S, ...) by (B or 1, P) gives (B, P, ...)."""
    if len(index) == 1:
        return x.index_select(1, index[0])
    index = index.reshape(*index.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(-1, -1, *x.shape[2:]))


def whole_places(num_tokens: int, chunk_size: int, device: torch.device) -> Places:
    """Return the places of rows that begin at a sequence's first token.

    The last chunk is padded; causality hides the padding, as it comes after all tokens.
    """
    N = -(-num_tokens // chunk_size)
    hi = torch.arange(N, device=device)[None]
    return Places(chunk_size, num_tokens, N, N * (chunk_size + 1), torch.zeros_like(hi), hi)


class PackedChunks(NamedTuple):
    """How T tokens of S packed sequences are cut into chunks: each sequence begins a new chunk."""

    num_chunks: int
    """Enough for any borders, since these are not read; chunks left over belong to no sequence."""
    starts: Tensor
    """(S + 1,), the first chunk of each sequence; the last entry is the number of used chunks."""
    chunk: Tensor
    """(T,), the chunk of each token."""
    offset: Tensor
    """(T,), its place in the chunk."""

    def first(self, chunk: Tensor) -> Tensor:
        """Return the first chunk of the sequence that each chunk belongs to."""
        return self.starts[torch.searchsorted(self.starts, chunk, right=True) - 1]


def packed_chunks(num_tokens: int, chunk_size: int, cu_seqlens: Tensor) -> PackedChunks:
    """Cut T tokens by the borders (S + 1,) of packed sequences into chunks of L tokens."""
    T, L, S = num_tokens, chunk_size, len(cu_seqlens) - 1
    borders = cu_seqlens.to(torch.int64)
    starts = F.pad((-(borders.diff() // -L)).cumsum(0), (1, 0))
    owner = sequence_ids(T, cu_seqlens)
    t = torch.arange(T, device=cu_seqlens.device) - borders[owner]
    return PackedChunks(min(T, (T + S * (L - 1)) // L), starts, starts[owner] + t // L, t % L)


def packed_places(num_tokens: int, chunk_size: int, cu_seqlens: Tensor) -> Places:
    """Return the places of packed sequences: each is padded to whole chunks of its own."""
    T, L = num_tokens, chunk_size
    chunks = packed_chunks(T, L, cu_seqlens)
    N, starts = chunks.num_chunks, chunks.starts
    place_of = chunks.chunk * (L + 1) + chunks.offset
    source = torch.full((N * (L + 1),), T + 1, device=cu_seqlens.device)
    source[L :: L + 1] = T
    source = source.scatter(0, place_of, torch.arange(T, device=cu_seqlens.device))
    # Chunk n + 1 reads chunks of its own sequence, from the first one to chunk n - 1.
    readers = torch.arange(1, N + 1, device=cu_seqlens.device)
    return Places(
        L, T, N, N * (L + 1), chunks.first(readers)[None], readers[None] - 1,
        source[None], place_of[None],
        # Not by `pad`: torch.compile takes its value for a constant, and would compile a graph for
        # each number of sequences.
        cu_seqlens=torch.cat([starts * (L + 1), starts.new_full((1,), N * (L + 1))]),
    )  # fmt: skip


class Continued(NamedTuple):
    """The places of a call that goes on from a state, and how many chunks it completes.

    Attributes:
        places: of the call.
        before: (B,), how many chunks of each row were complete.
        done: (B,), how many the call completes. The next call begins in this chunk of the grid.
        num_before: the value of `before` if all rows have the same, else None.
        num_after: the most complete chunks of a row after the call.
        num_done: the most chunks that the call completes in a row.
        writes_at: the value of `before` if it is the same in all rows that complete chunks, else
            None.
    """

    places: Places
    before: Tensor
    done: Tensor
    num_before: int | None
    num_after: int
    num_done: int
    writes_at: int | None

    def first_needed(self, num_layers: int, window_size: int) -> int:
        """Return the first chunk of the grid that upper layers must run over for the last output.

        If they start at a chunk, the first outputs are wrong, as earlier places are missing. Each
        layer's output is exact max(W, L + 1) places after its input is: it needs the W places of
        the window, and the landmark before the chunk. The last landmark must be exact too. Rows
        that stand at different places need all chunks.
        """
        places, M = self.places, self.places.chunk_size + 1
        if self.num_before is None or places.shifts is not None or places.lengths is not None:
            return 0
        needed = num_layers * max(window_size, M) + M
        return max(0, (places.shift + places.num_places - needed) // M)

    def place_of(self, n: int) -> int:
        """Return the place at which chunk n of the grid begins, where all rows have the same."""
        assert self.num_before is not None
        return (self.num_before + n) * (self.places.chunk_size + 1)


def continued_places(
    start: Tensor, num_tokens: int, lengths: Tensor | None, chunk_size: int
) -> Continued:
    """Return the places of the next segment of each row.

    A chunk's landmark comes with its last token; a landmark that a step has left for later comes
    first. Rows may stand at different places in their chunks. The call waits for a GPU once, to
    read these.

    Args:
        start: (B,), the places before the segment.
        num_tokens: T.
        lengths: (B,), the real tokens of each row; None if all are.
        chunk_size: L.
    """
    L, T, M, device = chunk_size, num_tokens, chunk_size + 1, start.device
    real = torch.full_like(start, T) if lengths is None else lengths
    start, real = torch.stack([start, real]).cpu()
    before, shifts = start // M, start % M
    seen = start - before
    end = seen + real + (seen + real) // L
    num_places = _largest(end - start)
    num_chunks = max(1, _largest(-((shifts + end - start) // -M)))
    place = start[:, None] + torch.arange(num_places, device=start.device)
    source = place - place // M - seen[:, None]
    source = source.masked_fill(place % M == L, T).masked_fill(place >= end[:, None], T + 1)
    token = seen[:, None] + torch.arange(T, device=start.device)
    tokens = (token + token // L - start[:, None]).clamp(max=max(num_places - 1, 0))
    same_shift = _same(shifts)
    same_end = _same(end - start) is not None
    hi = before[:, None] + torch.arange(num_chunks, device=start.device)
    places = Places(
        L, T, num_chunks, num_places, torch.zeros_like(hi).to(device), hi.to(device),
        source.to(device), tokens.to(device),
        shift=same_shift or 0,
        shifts=shifts.to(device) if same_shift is None else None,
        lengths=None if same_end else (end - start).to(device),
    )  # fmt: skip
    done = end // M - before
    return Continued(
        places, before.to(device), done.to(device), _same(before), _largest(before + done),
        _largest(done), _same(before[done > 0]),
    )  # fmt: skip


def _largest(values: Tensor) -> int:
    return int(values.max()) if values.numel() else 0


def _same(values: Tensor) -> int | None:
    """Return the value if all are equal, else None; 0 if there are none."""
    if values.numel() == 0:
        return 0
    return int(values[0]) if bool((values == values[0]).all()) else None
