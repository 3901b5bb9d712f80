"""The precision in which ops accumulate, whatever they are given."""

from contextlib import AbstractContextManager, nullcontext

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of gates, states and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products keep their dtype; some devices know no autocast."""
    if not torch.amp.is_autocast_available(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
