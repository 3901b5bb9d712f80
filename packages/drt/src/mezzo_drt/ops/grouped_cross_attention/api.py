"""The public op `grouped_cross_attention`."""

from jaxtyping import Float, Int
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.reference import grouped_cross_attention_reference


def grouped_cross_attention(
    q: Float[Tensor, "B N M H D"],
    k: Float[Tensor, "B S L H D"],
    v: Float[Tensor, "B S L H D"],
    indices: Int[Tensor, "B N R"],
    weights: Float[Tensor, "B N R"],
    *,
    softmax1: bool = True,
    scale: float | None = None,
) -> Float[Tensor, "B N M H D"]:
    """Attend from each chunk's places to the chunks it retrieved; see the reference."""
    if scale is None:
        scale = q.shape[-1] ** -0.5
    return grouped_cross_attention_reference(q, k, v, indices, weights, softmax1, scale)
