"""The options of a RAT attention: all that says what to compute, besides the tensors."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import apply_rope, rope_angles
from torch import Tensor

FORM_SCHEMA = (
    "SymInt num_heads, SymInt num_groups, bool has_z, SymInt chunk_size, "
    "str rope, float rope_base, float scale"
)
"""The plain arguments of a form, as the schema of a registered op declares them."""


class Form(NamedTuple):
    """What to compute. Registered ops take it as plain numbers and strings (`as_arguments`)."""

    num_heads: int
    """H."""
    num_groups: int
    """G: head h reads the queries and keys of group h % G."""
    has_z: bool
    """Whether there is an output gate."""
    chunk_size: int
    """L."""
    rope: Literal["chunk", "token"] | None
    rope_base: float
    scale: float
    """Multiplies the logits."""

    def as_arguments(self) -> tuple[Any, ...]:
        """Return the values that FORM_SCHEMA declares; `rope=None` becomes the string "none"."""
        return (
            self.num_heads,
            self.num_groups,
            self.has_z,
            self.chunk_size,
            self.rope or "none",
            self.rope_base,
            self.scale,
        )

    @classmethod
    def from_arguments(cls, arguments: Sequence[Any]) -> "Form":
        """Return the form that `as_arguments` described."""
        num_heads, num_groups, has_z, chunk_size, rope, rope_base, scale = arguments
        rope = None if rope == "none" else rope
        return cls(num_heads, num_groups, has_z, chunk_size, rope, rope_base, scale)

    def head_dim(self, width: int) -> int:
        """Return D for a projection of `width` channels."""
        return width // ((2 + self.has_z) * self.num_heads + 2 * self.num_groups)

    def rotate(self, x: Tensor, chunk: Tensor, position: Tensor) -> Tensor:
        """Apply RoPE to x (B, T, H, D) at chunk indices or token positions (1 or B, T)."""
        if self.rope is None:
            return x
        at = chunk if self.rope == "chunk" else position
        dtype = accumulation_dtype(x.dtype)
        return apply_rope(x, *rope_angles(at, x.shape[-1], self.rope_base, dtype=dtype))
