"""The precision in which ops accumulate."""

import torch


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for gates, states and sums: float32, or float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
