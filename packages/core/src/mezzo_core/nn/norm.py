"""The norms of blocks and attention."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo_core.nn.linear import is_unchanged

NormKind = Literal["rms", "layer", "none"]
"""RMSNorm, LayerNorm without bias, or no norm."""


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` for inputs and weights of different dtypes, as under autocast.

    For two dtypes PyTorch has no fused kernel: it warns, and launches one operation after another.
    So here both are cast to the wider dtype first. The result has the dtype of the input.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return x / RMS(x) times the weight, over the last dimension."""
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        y = F.rms_norm(x.to(wide), self.normalized_shape, self.weight.to(wide), self.eps)
        return y.to(x.dtype)


class LayerNorm(nn.LayerNorm):
    """`nn.LayerNorm` whose result has the input's dtype, where autocast makes it float32."""

    def forward(self, x: Tensor) -> Tensor:
        """Return x less its mean, over its standard deviation, times the weight."""
        return super().forward(x).to(x.dtype)


def is_plain_norm(norm: nn.Module, eps: float) -> bool:
    """Tell whether a kernel may replace a module: it is RMSNorm with a weight and this eps only."""
    return (
        isinstance(norm, nn.RMSNorm)
        and type(norm).forward in (RMSNorm.forward, nn.RMSNorm.forward)
        and norm.weight is not None
        and norm.eps == eps
        and is_unchanged(norm)
    )


def build_norm(kind: NormKind, width: int, eps: float) -> nn.Module:
    """Build a norm over the last dimension, on torch's default device."""
    if kind == "rms":
        return RMSNorm(width, eps)
    return LayerNorm(width, eps, bias=False) if kind == "layer" else nn.Identity()
