"""The two sets of parts of the tiled algorithm: PyTorch's operations, or Triton kernels."""

from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers import eager
from mezzo_recurrent_transformer.ops.recurrent_layers.form import LayerWeights


def parts_of(impl: str) -> ModuleType:
    """Return the module with the parts for an `impl`, "eager" or "triton"."""
    if impl == "eager":
        return eager
    from mezzo_recurrent_transformer.ops.recurrent_layers import triton

    return triton


class Matrices(NamedTuple):
    """The weights of some layers in the dtype of the products; those of one input side by side."""

    qkv: Tensor
    """(n, 3C, C)."""
    o: Tensor
    """(n, C, C)."""
    up: Tensor
    """(n, F, C)."""
    down: Tensor
    """(n, C, F)."""
    n1: Tensor | None
    n2: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None

    @classmethod
    def of(cls, w: LayerWeights, dtype: torch.dtype) -> "Matrices":
        """Return copies of the weights, laid out for the products."""
        qkv = torch.cat([x.to(dtype) for x in (w.wq, w.wk, w.wv)], 1)
        o, up, down = (x.to(dtype).contiguous() for x in (w.wo, w.up, w.down))
        return cls(qkv, o, up, down, w.n1, w.n2, w.q_norm, w.k_norm)

    def of_layers(self, first: int, end: int) -> "Matrices":
        """Return the weights of layers `first` to `end`."""
        return self.map(lambda w: w[first:end])

    def map(self, change: Callable[[Tensor], Tensor]) -> "Matrices":
        """Return `change` of each weight that there is."""
        found: Any = [None if w is None else change(w) for w in self]
        return Matrices(*found)

    @property
    def kv(self) -> Tensor:
        """(m, 2C, C)."""
        return self.qkv[:, self.qkv.shape[2] :]
