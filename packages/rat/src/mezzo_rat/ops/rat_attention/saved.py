"""The tensors that the backward of RAT attention needs, in the order of its ops' arguments."""

from typing import NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """Of rows that start with their first token, and of packed sequences."""

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


class SavedContinued(NamedTuple):
    """Of rows that continue a state."""

    x: Tensor
    gate_bias: Tensor | None
    k: Tensor
    """(B, H, D) float32: k~ of the open chunk before these tokens."""
    v: Tensor
    """(B, H, D) float32: v~ of the open chunk before these tokens."""
    lengths: Tensor
    """(B,) int64: the tokens that each row had seen."""
    added: Tensor
    """(B,) int64: the real tokens of each row."""
    y: Tensor
    lse: Tensor
    k_ends: Tensor
    """(B, N + 1, H, D): k~ at the end of each chunk, rotated; the last slot holds nothing."""
    v_ends: Tensor
    """(B, N + 1, H, D): v~ at the end of each chunk."""
