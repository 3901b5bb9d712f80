"""Products with the weights of each layer, by PyTorch."""

import torch
from mezzo_core.ops.precision import add_product
from torch import Tensor


def product(x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """Return x Wᵀ of each layer: (m, ..., K) and (m, N, K) to (m, ..., N)."""
    rows = x.flatten(1, -2)
    if out is None:
        return torch.bmm(rows, weight.mT).unflatten(1, x.shape[1:-1])
    torch.bmm(rows, weight.mT, out=out.flatten(1, -2))
    return out


def add_outer(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add the gradient of the weight of `product` to `total` (m, N, K), in its precision."""
    add_product(total, dy.flatten(1, -2).mT, x.flatten(1, -2))
