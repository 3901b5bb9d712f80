"""The precision in which ops accumulate, and that of torch's products."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

SPLIT_K = tuple(f"allow_{dtype}_reduced_precision_reduction_split_k" for dtype in ("fp16", "bf16"))
"""Settings of torch's products that older versions lack."""


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


def product_settings() -> tuple[Any, ...]:
    """Return the settings of torch's products on a GPU: a CUDA graph keeps those of its capture."""
    products = torch.backends.cuda.matmul
    has_name = hasattr(products, "fp32_precision")  # since torch 2.9
    return (
        products.fp32_precision if has_name else products.allow_tf32,
        products.allow_fp16_accumulation,
        products.allow_fp16_reduced_precision_reduction,
        products.allow_bf16_reduced_precision_reduction,
        *(getattr(products, name, None) for name in SPLIT_K),
    )
