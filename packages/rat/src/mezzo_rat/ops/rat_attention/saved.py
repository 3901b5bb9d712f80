"""What the backward of RAT attention needs."""

from typing import NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """The tensors that the backward needs."""

    x: Tensor
    """(B, T, W): the projection."""
    gate_bias: Tensor | None
    """(H, D)."""
    cu_seqlens: Tensor | None
    """(S + 1,): borders of packed sequences."""
    y: Tensor
    """(B, T, H, D): the output."""
    lse: Tensor
    """(B, H, T) float32: log2 of the sum of the exponentials of each query's logits."""
    k_ends: Tensor
    """(B, N, H, D): k~ at the end of each chunk, rotated."""
    v_ends: Tensor
    """(B, N, H, D): v~ at the end of each chunk."""
