"""The request of one call to the kernels of gated slot attention, and the tensors it saves."""

from typing import Any, NamedTuple

from torch import Tensor

from mezzo_gsa.ops.chunking.by_token import by_token
from mezzo_gsa.ops.chunking.chunks import Chunks, place_chunks
from mezzo_gsa.ops.gsa.form import Form
from mezzo_gsa.ops.gsa.projection import Parts
from mezzo_gsa.ops.gsa.tiling import chunk_length


class Inputs(NamedTuple):
    """The inputs of a call, or their gradients; q, k, v, g may be views into one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    s: Tensor | None


class Request(NamedTuple):
    """One call of the kernels."""

    x: Inputs
    k0: Tensor | None
    """(S, H, M, K), the initial K~; None: zeros."""
    v0: Tensor | None
    """(S, H, M, V), the initial V~; None: zeros."""
    chunks: Chunks
    form: Form
    raw: Parts | None
    """The parts of the projection before swish, if swish is applied; `x` has them after it."""


def make_request(
    parts: Parts,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    form: Form,
    raw: Parts | None = None,
) -> Request:
    """Return the request of a registered op, with inputs that kernels can read, and the chunks."""
    q, k, v, g = (by_token(part) for part in parts)
    x = Inputs(q, k, v, g, None if s is None else s.contiguous())
    B, T, _, M = g.shape
    chunks = place_chunks(B, T, chunk_length(q.dtype, M), cu_seqlens)
    return Request(x, k0, v0, chunks, form, raw)


class Memory(NamedTuple):
    """The memories at the borders of chunks, and sums and products of the gates."""

    running: Tensor
    """(B, T, H, M): running sums of log gates, from the chunk's start."""
    strength: Tensor | None
    """(B, T, H, M): write strengths; only the backward needs them."""
    write: Tensor
    """(B, T, H, M): write strengths, decayed to the chunk's end."""
    decay: Tensor
    """(chunks, H, M): the share of the memory before it that a chunk keeps."""
    bands: Tensor
    """(chunks, H, tiles): how many bands the running sums reach (see `triton/slots.py`)."""
    kept: Tensor
    """(chunks, H, M): the share of its segment's first memory that is left at a chunk's start."""
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

    def as_tensors(self, like: Tensor) -> tuple[Tensor, ...]:
        """Return all fields as tensors, which an op can return; None becomes an empty tensor."""
        memory = (None,) * len(Memory._fields) if self.memory is None else self.memory
        tensors = (self.logits, self.weights, self.swished, *memory)
        # The results of an op must be different tensors, even if they are empty.
        return tuple([like.new_empty(0) if x is None else x for x in tensors])

    @classmethod
    def from_tensors(cls, tensors: list[Tensor]) -> "Saved":
        """Return the object from the tensors that `as_tensors` returned."""
        parts: list[Any] = [x if x.numel() else None for x in tensors]
        logits, weights, swished, running, *rest = parts
        return cls(logits, weights, swished, None if running is None else Memory(running, *rest))


NUM_SAVED = len(Saved._fields) - 1 + len(Memory._fields)
"""How many tensors `Saved.as_tensors` returns."""
