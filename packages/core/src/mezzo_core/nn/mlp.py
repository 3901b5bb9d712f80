"""The position-wise half of a block: GELU or SwiGLU, no biases."""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from mezzo_core.config_json import check_fields
from mezzo_core.nn.linear import Linear

MLPKind = Literal["gelu", "swiglu"]


@dataclass(frozen=True)
class MLPConfig:
    """The kind and the width of a block's MLP.

    Attributes:
        kind: "gelu" (two matrices, exact erf form) or "swiglu" (three).
        hidden: the hidden width F. The default is 4C for "gelu" and, for about the same number of
            weights, 8C/3 for "swiglu", rounded up to a multiple of 256.
    """

    kind: MLPKind = "gelu"
    hidden: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        if self.hidden is not None and self.hidden < 1:
            raise ValueError(f"hidden must be at least 1, got {self.hidden}")

    def hidden_width(self, d_model: int) -> int:
        """Return the hidden width F of an MLP in a model of width `d_model`."""
        if self.hidden is not None:
            return self.hidden
        return 4 * d_model if self.kind == "gelu" else 256 * -(-8 * d_model // (3 * 256))

    def build(self, d_model: int) -> "GELUMLP | SwiGLU":
        """Build the MLP, on torch's default device."""
        hidden = self.hidden_width(d_model)
        return GELUMLP(d_model, hidden) if self.kind == "gelu" else SwiGLU(d_model, hidden)


class GELUMLP(nn.Module):
    """`down(gelu(up(x)))`, with the exact GELU: x Φ(x) (Hendrycks and Gimpel, 2016)."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = Linear(d_model, hidden, bias=False)
        self.down = Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C), each token alone."""
        return self.down(F.gelu(self.up(x)))


class SwiGLU(nn.Module):
    """`down(silu(gate(x)) * up(x))` (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.gate = Linear(d_model, hidden, bias=False)
        self.up = Linear(d_model, hidden, bias=False)
        self.down = Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map (B, T, C) to (B, T, C), each token alone."""
        return self.down(F.silu(self.gate(x)) * self.up(x))
