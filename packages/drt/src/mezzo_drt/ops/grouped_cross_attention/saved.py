"""What the backward of grouped cross-attention needs."""

from typing import NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """The tensors that the backward needs; it recomputes the attention weights."""

    q: Tensor
    """(B, N, M, H, D)."""
    k: Tensor
    """(B, S, L, H, D)."""
    v: Tensor
    """(B, S, L, H, D)."""
    indices: Tensor
    """(B, N, R) int64."""
    weights: Tensor
    """(B, N, R) float32."""
    lse: Tensor
    """(B, N, R, H, M) float32: the natural log-sum-exp of a query's logits over one chunk."""
