"""The positions of the chunks in a call: of plain, packed and continued rows.

`Chunks` describes them alike for PyTorch, `Plan` with what else the launches of kernels need.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from mezzo_core.ops.packed import check_borders
from mezzo_core.positions import rope_angles, sequence_ids
from torch import Tensor

from mezzo_rat.ops.divide import floor_divide
from mezzo_rat.ops.rat_attention.arguments import Form


def bias_parts(num_chunks: int) -> int:
    """Return how many programs go back over all chunks; each has a part of the bias's gradient."""
    return torch.sym_min(num_chunks, 1024)


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


class Sizes(NamedTuple):
    """Sizes of a projection (B, T, W): z (if any), v, g of H·D channels each, q, k of G·D each."""

    B: int
    T: int
    H: int
    G: int
    D: int
    has_z: bool

    @classmethod
    def of(cls, x: Tensor, form: Form) -> "Sizes":
        """Return the sizes of a projection."""
        B, T, W = x.shape
        return cls(B, T, form.num_heads, form.num_groups, form.head_dim(W), form.has_z)

    @property
    def width(self) -> int:
        """W, all channels of the projection."""
        return (2 + self.has_z) * self.H * self.D + 2 * self.G * self.D

    @property
    def offsets(self) -> dict[str, int]:
        """The first channel of v, g, q and k; z, if there is one, begins at 0."""
        v = self.H * self.D if self.has_z else 0
        g = v + self.H * self.D
        q = g + self.H * self.D
        return {"OV": v, "OG": g, "OQ": q, "OK": q + self.G * self.D}


class Plan(NamedTuple):
    """What to compute, the positions of the chunks, the slots that queries see, and the angles."""

    form: Form
    sizes: Sizes
    mode: Literal["plain", "packed", "continued"]
    N: int
    """Chunks of a row. Packed: the most chunks that all sequences together may have."""
    starts: Tensor | None
    """Packed: (N,) first token of each chunk. Continued: (B,) tokens that each row has seen."""
    stops: Tensor | None
    """Packed: (N,) one past the chunk's last token. Continued: (B,) tokens added to each row."""
    low: Tensor | None
    """Packed: (T,) the first slot that each token sees."""
    high: Tensor | None
    """Packed: (T,) one past the last slot that each token sees."""
    unseen: Tensor | None
    """Packed: (N,) one past the last token whose sequence begins at or before each slot."""
    q_places: Tensor
    """(1 or B, T) int32: the row of `angles` that rotates each query."""
    k_places: Tensor
    """(1 or B, N) int32: the row of `angles` that rotates each chunk's end."""
    angles: tuple[Tensor, Tensor] | None
    """Cosines and sines, (P, D/2) each; None: no RoPE."""


LONGEST_KEPT = 4096
"""Rows with more tokens keep no plan: it would save little time for its memory."""


def plain_plan(x: Tensor, form: Form) -> Plan:
    """Plan for rows that start with their first token."""
    return _plain_plan(Sizes.of(x, form), form, x.device)


def kept_plan(x: Tensor, form: Form) -> Plan:
    """Return the `plain_plan`, maybe from an earlier call: small calls take long to compute it.

    For eager code only: what a compiled graph makes may lie in memory that the graph uses again.
    """
    sizes = Sizes.of(x, form)
    # In a CUDA graph a tensor has no values before the replay.
    if sizes.T > LONGEST_KEPT or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
        return _plain_plan(sizes, form, x.device)
    # Another stream could read the plan before it is computed.
    stream = torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None
    return _kept_plan(sizes, form, x.device, stream)


@lru_cache(maxsize=16)
def _kept_plan(sizes: Sizes, form: Form, device: torch.device, _stream: int | None) -> Plan:
    return _plain_plan(sizes, form, device)


def _plain_plan(sizes: Sizes, form: Form, device: torch.device) -> Plan:
    T, L = sizes.T, form.chunk_size
    N = -(-T // L)
    token = torch.arange(T, device=device, dtype=torch.int32)[None]
    chunk = torch.arange(N, device=device, dtype=torch.int32)[None]
    if form.rope == "token":
        places = token, ((chunk + 1) * L - 1).clamp(max=T - 1)
    else:
        places = token // L, chunk
    angles = _angles(form, T if form.rope == "token" else N, sizes.D, device)
    return Plan(form, sizes, "plain", N, None, None, None, None, None, *places, angles)


def packed_plan(x: Tensor, form: Form, cu_seqlens: Tensor) -> Plan:
    """Plan for one row of packed sequences; no query sees a slot of another sequence."""
    sizes = Sizes.of(x, form)
    T, L = sizes.T, form.chunk_size
    chunks = packed_chunks(T, L, cu_seqlens)
    assert chunks.first is not None
    low, high, end = chunks.first[0], chunks.slot[0], chunks.end[0]
    N = end.shape[0]
    slots = torch.arange(N, device=end.device)
    starts, stops = (torch.searchsorted(high, slots, right=right) for right in (False, True))
    unseen = torch.searchsorted(low, slots, right=True)
    at = chunks.position if form.rope == "token" else chunks.chunk
    angles = _angles(form, T if form.rope == "token" else T // L + 1, sizes.D, end.device)
    places = at.int(), at[:, end].int()
    return Plan(
        form, sizes, "packed", N, starts, stops, low, high, unseen, *places, angles
    )  # fmt: skip


def continued_plan(x: Tensor, form: Form, num_slots: int, seen: Tensor, added: Tensor) -> Plan:
    """Plan for rows that have seen `seen` (B,) tokens and get `added` (B,) more."""
    sizes = Sizes.of(x, form)
    T, L = sizes.T, form.chunk_size
    added = added.clamp(0, T)  # on a GPU nobody has checked it, and kernels write so many tokens
    N = (T - 1) // L + 2  # the first chunk may be open already and take only some of the tokens
    position = seen[:, None] + torch.arange(T, device=seen.device)
    slot = (seen // L)[:, None] + torch.arange(N, device=seen.device)
    if form.rope == "token":
        places = position, torch.minimum((slot + 1) * L, (seen + added)[:, None]) - 1
        num_places = num_slots * L
    else:
        places = position // L, slot
        num_places = num_slots
    q_places, k_places = (place.clamp(0, num_places - 1).int() for place in places)
    angles = _angles(form, num_places, sizes.D, seen.device)
    return Plan(
        form, sizes, "continued", N, seen, added, None, None, None, q_places, k_places, angles
    )  # fmt: skip


def _angles(
    form: Form, num_places: int, dim: int, device: torch.device
) -> tuple[Tensor, Tensor] | None:
    if form.rope is None:
        return None
    return rope_angles(torch.arange(num_places, device=device), dim, form.rope_base)
