"""The precision in which ops accumulate."""

from contextlib import AbstractContextManager, nullcontext

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for gates, states and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """Return the dtype of products under autocast; None without it, as on the meta device."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context without autocast; the meta device has no autocast to switch off."""
    if device.type == "meta":
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
