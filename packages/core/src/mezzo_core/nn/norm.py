"""The norms of blocks and attention."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mezzo_core.nn.linear import is_unchanged

NormKind = Literal["rms", "layer", "none"]
"""RMSNorm, LayerNorm without bias, or no norm."""


class RMSNorm(nn.RMSNorm):
    """`nn.RMSNorm` for inputs whose dtype is not that of the weight, such as autocast's outputs.

    PyTorch has fused kernels for one dtype alone: it warns, and launches an operation after the
    other. So here both are brought to the wider dtype first. The result has the input's, as there.
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
    """Tell whether a module computes only RMSNorm(x), so that a kernel may do it in its place.

    The kernel takes the weight, which there must be, and this eps.
    """
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
