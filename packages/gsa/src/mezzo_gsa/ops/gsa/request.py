"""What the kernels of gated slot attention are asked, and what they return and keep."""

from typing import Any, NamedTuple

from torch import Tensor

from mezzo_gsa.ops.chunking.by_token import by_token
from mezzo_gsa.ops.chunking.chunks import Chunks, place_chunks
from mezzo_gsa.ops.gsa.form import Form
from mezzo_gsa.ops.gsa.projection import Parts
from mezzo_gsa.ops.gsa.tiling import chunk_length


class Inputs(NamedTuple):
    """What a call reads, or the gradients of it; q, k, v, g may be parts of one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    s: Tensor | None


class Request(NamedTuple):
    """One call of the kernels."""

    x: Inputs
    k0: Tensor | None
    """(S, H, M, K), the first K~; None: zeros."""
    v0: Tensor | None
    """(S, H, M, V), the first V~; None: zeros."""
    chunks: Chunks
    form: Form
    raw: Parts | None
    """The projection before its swish, if it had one; q, k and v of `x` are behind it."""


def make_request(
    parts: Parts,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    form: Form,
    raw: Parts | None = None,
) -> Request:
    """Return the request of a registered op: inputs as kernels read them, chunks placed."""
    q, k, v, g = (by_token(part) for part in parts)
    x = Inputs(q, k, v, g, None if s is None else s.contiguous())
    B, T, _, M = g.shape
    chunks = place_chunks(B, T, chunk_length(q.dtype, M), cu_seqlens)
    return Request(x, k0, v0, chunks, form, raw)


class Memory(NamedTuple):
    """The memories at the borders of chunks, and what the gates come to."""

    running: Tensor
    """(B, T, H, M): running sums of log gates, from the chunk's start."""
    strength: Tensor | None
    """(B, T, H, M): write strengths; for the backward only."""
    write: Tensor
    """(B, T, H, M): write strengths, decayed to the chunk's end."""
    decay: Tensor
    """(chunks, H, M): what a chunk keeps of the memory before it."""
    bands: Tensor
    """(chunks, H, tiles): how many bands the running sums reach (see `triton/slots.py`)."""
    kept: Tensor
    """(chunks, H, M): what is left, where a chunk begins, of what flowed into its segment."""
    k_states: Tensor
    """(chunks, H, M, K): K~ where each chunk begins, counted from zero at its segment's start."""
    v_states: Tensor
    """(chunks, H, M, V): the same of V~."""
    k_starts: Tensor | None
    """(segments, H, M, K): K~ where each segment begins; None: zeros."""
    v_starts: Tensor | None
    """(segments, H, M, V): the same of V~."""


class Saved(NamedTuple):
    """What a forward keeps for the backward; None: not kept, as `Form.keep` tells."""

    logits: Tensor | None = None
    """(B, T, HQ, M) float32: what stands before the softmax."""
    weights: Tensor | None = None
    """(B, T, HQ, M): what reads the memory that each chunk begins with."""
    swished: Tensor | None = None
    """(B, T, W): a projection behind its swish."""
    memory: Memory | None = None

    def as_tensors(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return all as tensors, the results of an op: what is None becomes an empty tensor."""
        memory = (None,) * len(Memory._fields) if self.memory is None else self.memory
        tensors = (self.logits, self.weights, self.swished, *memory)
        # No two results of an op may be one tensor, not even an empty one.
        return tuple([like.new_empty(0) if x is None else x for x in tensors])

    @classmethod
    def from_tensors(cls, tensors: list[Tensor]) -> "Saved":
        """Return what `as_tensors` was called on."""
        parts: list[Any] = [x if x.numel() else None for x in tensors]
        logits, weights, swished, running, *rest = parts
        return cls(logits, weights, swished, None if running is None else Memory(running, *rest))


NUM_SAVED = len(Saved._fields) - 1 + len(Memory._fields)
"""How many tensors `Saved.as_tensors` returns."""
