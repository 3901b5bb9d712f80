"""The public op `grouped_cross_attention`: checks its arguments and chooses an implementation."""

from typing import Any

import torch
from jaxtyping import Float, Int64
from mezzo_core.ops.checks import check_number
from mezzo_core.ops.impl import Impl, resolve_impl
from mezzo_core.ops.precision import without_autocast
from mezzo_core.ops.shapes import Shapes, check_one_dtype
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.op import differentiable_attention
from mezzo_drt.ops.grouped_cross_attention.readers import Readers, check_indices
from mezzo_drt.ops.grouped_cross_attention.reference import grouped_cross_attention_reference

OP = "grouped_cross_attention"
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_WIDTHS = (16, 32, 64, 128, 256)
TRITON_KEYS = 128
_SHAPES = Shapes(
    q="B N M H D",
    k="B S L H D",
    v="B S L H D",
    indices="int64: B N R",
    weights="B N R",
    filled="L H D",
)


def grouped_cross_attention(
    q: Float[Tensor, "B N M H D"],
    k: Float[Tensor, "B S L H D"],
    v: Float[Tensor, "B S L H D"],
    indices: Int64[Tensor, "B N R"],
    weights: Float[Tensor, "B N R"],
    *,
    softmax1: bool = True,
    scale: float | None = None,
    readers: Readers | None = None,
    impl: Impl = "auto",
) -> Float[Tensor, "B N M H D"]:
    """Attend from each chunk's queries to the chunks that it retrieved, each by its own softmax.

    Section 3.1, Equations 2 and 3. `grouped_cross_attention_reference` is the definition: the
    result is the weighted sum of the outputs of the retrieved chunks. Differentiable in q, k, v and
    weights, but only once. Softmax and sums are in float32 (float64 for float64).

    The kernels read chunks by their index, without copies of them, and keep no attention weights
    for the backward. They use no atomics, so repeats are equal to the bit.

    Args:
        q: (B, N, M, H, D), the queries of N chunks, M places each (with a landmark L + 1).
        k: (B, S, L, H, D), the keys of S chunks, in the dtype of q.
        v: (B, S, L, H, D), their values, likewise.
        indices: (B, N, R) int64, which chunks of its row each chunk reads; -1 for none, whose
            weight is not read. A chunk may be read by any number of chunks. Values are checked on
            the CPU only: on a GPU a wrong one reads foreign memory.
        weights: (B, N, R), the weight of each retrieved chunk, of any float dtype.
        softmax1: use softmax1(s)_i = exp(s_i) / (1 + Σ exp(s)), so that a query may ignore a chunk;
            False for the softmax.
        scale: of the products of queries and keys; None for D^-1/2.
        readers: `readers_of(indices, S)`, for calls that share their indices: it saves the kernels'
            backward this computation.
        impl: "reference"; "triton" (D a power of 2 from 16 to 256, L to 128, not in float64); or
            "auto".

    Returns:
        (B, N, M, H, D) in the dtype of q; 0 where nothing is retrieved.

    Raises:
        TypeError: if an argument or a tensor has a wrong type.
        ValueError: if a shape, a device, an index, `scale` or `impl` is wrong.
    """
    sizes = _SHAPES.check(OP, q, k, v, indices, weights)
    check_one_dtype(OP, q=q, k=k, v=v)
    check_indices(OP, indices, sizes["S"])
    if not isinstance(softmax1, bool):
        raise TypeError(f"{OP}: softmax1 must be a bool, got {type(softmax1).__name__}")
    if readers is not None:
        _check_readers(readers, indices, k.shape[0] * k.shape[1])
    if scale is None:
        scale = q.shape[-1] ** -0.5
    check_number(OP, "scale", scale)
    if scale <= 0:  # the kernels take the maximum before they scale, so the scale must be positive
        q, scale = (-q, -scale) if scale < 0 else (q * 0, 1.0)
    if resolve_impl(OP, impl, q.device, _unsupported(k)) == "triton":
        tensors = (q.contiguous(), k, v, indices.contiguous(), weights.float().contiguous())
        lists: tuple[Tensor | None, ...] = (None,) * 4
        if readers is not None:
            lists = (readers.order, readers.offsets, readers.parts, readers.chunks)
        return differentiable_attention(*tensors, *lists, softmax1, float(scale))[0]
    if k.shape[1] == 0:  # the reference gathers from a chunk, though nobody reads it
        k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, *x.shape[2:])], 1) for x in (k, v))
    with without_autocast(q.device):
        return grouped_cross_attention_reference(q, k, v, indices, weights, softmax1, scale)


def _check_readers(readers: Any, indices: Tensor, chunks: int) -> None:
    """Check that the sizes of the lists fit the indices; no values are read."""
    if not isinstance(readers, Readers):
        raise TypeError(f"{OP}: readers must come from readers_of, got {type(readers).__name__}")
    found = (len(readers.order), len(readers.offsets))
    if found != (indices.numel(), chunks + 1):
        raise ValueError(
            f"{OP}: readers must be of these indices, {indices.numel()} reads of {chunks} chunks, "
            f"got {found[0]} of {found[1] - 1}"
        )


def _unsupported(k: Tensor) -> str | None:
    """Say why the kernels cannot do the request, or None if they can."""
    L, D = k.shape[2], k.shape[4]
    if k.dtype not in TRITON_DTYPES:
        return f"{k.dtype}; supported: float32, bfloat16, float16"
    if D not in TRITON_WIDTHS:
        return f"heads of width D = {D}; supported: {', '.join(map(str, TRITON_WIDTHS))}"
    if L > TRITON_KEYS:
        return f"chunks of L = {L} keys; supported: up to {TRITON_KEYS}"
    return None
