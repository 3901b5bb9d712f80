"""Products with the weights of each layer, by PyTorch."""

import torch
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
    rows_dy, rows_x = dy.flatten(1, -2), x.flatten(1, -2)
    if total.dtype == dy.dtype:
        total.baddbmm_(rows_dy.mT, rows_x)
    elif total.is_cuda:
        torch.baddbmm(total, rows_dy.mT, rows_x, out_dtype=total.dtype, out=total)
    else:
        total += torch.bmm(rows_dy.mT, rows_x)
