"""The arguments of gated slot attention's kernels, the tensors that they save, and the sizes."""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_gsa.ops.chunking.chunks import Chunks
from mezzo_gsa.ops.gsa.arguments import Form, Parts


class Tensors(NamedTuple):
    """The tensors of a call: a projection x, or q, k, v, g and maybe s."""

    x: Tensor | None = None
    """(B, T, W): q, k, v and the gates' logits side by side, see `Form.split`."""
    q: Tensor | None = None
    """(B, T, HQ, K)."""
    k: Tensor | None = None
    """(B, T, H, K)."""
    v: Tensor | None = None
    """(B, T, H, V)."""
    g: Tensor | None = None
    """(B, T, H, M) float32."""
    s: Tensor | None = None
    """(B, T, H, M) float32; None: 1 - exp(g)."""
    k0: Tensor | None = None
    """(S, H, M, K), the initial K~; None: zeros."""
    v0: Tensor | None = None
    """(S, H, M, V), the initial V~; None: zeros."""
    cu_seqlens: Tensor | None = None
    """(S + 1,) borders of packed sequences."""

    @property
    def inputs(self) -> tuple[Tensor | None, ...]:
        """x, q, k, v, g and s."""
        return self[:6]

    def parts(self, form: Form) -> Parts:
        """Return q, k, v and g, which may be views of the projection."""
        separate: Any = self[1:5]
        return Parts(*separate) if self.x is None else form.split(self.x)


class Inputs(NamedTuple):
    """The inputs of a call, or their gradients; q, k, v, g may be views into one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    s: Tensor | None = None


class Request(NamedTuple):
    """One call of the kernels."""

    x: Inputs
    k0: Tensor | None
    v0: Tensor | None
    chunks: Chunks
    form: Form
    raw: Parts | None
    """The parts of the projection before swish, if swish is applied; `x` has them after it."""


SHORTEST = 32
"""Tokens of the shortest chunks."""


def chunk_length(dtype: torch.dtype, num_slots: int, longest: int | None = None) -> int:
    """Return L, the largest for which the data that a program needs of a chunk fits on chip.

    If the longest row is known, L is not much longer: with few tokens, such as an assistant's, a
    program would mostly compute padding.
    """
    most = 64
    if dtype == torch.float32 and num_slots > 64:
        most = 32
    elif dtype == torch.bfloat16 and num_slots <= 64:
        most = 128
    return most if longest is None else min(most, max(SHORTEST, next_power_of_2(longest)))


def gate_tiles(num_slots: int) -> int:
    """Return how many tiles of 32 slots the gates of a chunk make, as a power of two."""
    return next_power_of_2(ceil_div(num_slots, 32))


class Memory(NamedTuple):
    """The memories at the borders of chunks, and sums and products of the gates."""

    running: Tensor
    """(B, T, H, M): running sums of log gates, from the chunk's start."""
    strength: Tensor | None
    """(B, T, H, M): write strengths; only the backward needs them."""
    write: Tensor
    """(B, T, H, M): write strengths, decayed to the chunk's end."""
    decay: Tensor
    """(chunks, H, M): the share of its first memory that each chunk keeps."""
    bands: Tensor
    """(chunks, H, tiles): how many bands the running sums reach (see `triton/slots.py`)."""
    kept: Tensor
    """(chunks, H, M): the share of the segment's first memory left at each chunk's start."""
    k_states: Tensor
    """(chunks, H, M, K): K~ where each chunk begins, if its segment starts from zero."""
    v_states: Tensor
    """(chunks, H, M, V): the same for V~."""
    k_starts: Tensor | None
    """(segments, H, M, K): K~ where each segment begins; None: zeros."""
    v_starts: Tensor | None
    """(segments, H, M, V): the same for V~."""


class Saved(NamedTuple):
    """The tensors that a forward saves for the backward; None: not saved (see `Form.keep`)."""

    logits: Tensor | None = None
    """(B, T, HQ, M) float32: the inputs of the softmax."""
    weights: Tensor | None = None
    """(B, T, HQ, M): the weights with which tokens read the memory at their chunk's start."""
    swished: Tensor | None = None
    """(B, T, W): a projection after swish."""
    memory: Memory | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors in one tuple, the memory's last."""
        memory = (None,) * len(Memory._fields) if self.memory is None else self.memory
        return self.logits, self.weights, self.swished, *memory

    @classmethod
    def from_tensors(cls, tensors: list[Tensor | None]) -> "Saved":
        """Return the object from its `tensors`; an empty tensor is a None that an op returned."""
        parts: list[Any] = [None if x is None or not x.numel() else x for x in tensors]
        logits, weights, swished, running, *rest = parts
        return cls(logits, weights, swished, None if running is None else Memory(running, *rest))
