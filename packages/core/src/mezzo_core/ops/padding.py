"""Padding on the right of a row, whose values must not influence real tokens."""

import torch
from torch import Tensor


def without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x (B, T, ...) with zeros after the `lengths` (B,) real tokens of each row.

    The padding is replaced, not multiplied by zero: a NaN times zero would still be NaN.
    """
    if lengths is None:
        return x
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return x.where(real.view(*real.shape, *[1] * (x.ndim - 2)), 0.0)


def last_real(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Take each row's last real token: (B, T, C) to (B, 1, C)."""
    if lengths is None:
        return x[:, -1:]
    index = (lengths - 1).clamp(min=0)[:, None, None].expand(-1, 1, x.shape[-1])
    return x.gather(1, index)
