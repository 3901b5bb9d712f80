"""The precision in which ops accumulate."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for gates, states and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add the product a b to `total` in the precision of `total`; matrices or batches of them."""
    add = torch.addmm if total.ndim == 2 else torch.baddbmm
    if total.dtype == a.dtype:
        add(total, a, b, out=total)
    elif total.is_cuda:
        add(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products under autocast; None without it, as on the meta device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast; it does nothing if autocast is off already.

    torch.compile would trace a real context, and torch never caches a graph with one on disk.
    """
    if autocast_dtype(device) is None:
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
