"""Padding on the right of a row, whose values must not influence real tokens."""

import torch
from torch import Tensor


def without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x (B, T, ...) with zeros after the `lengths` (B,) real tokens of each row.

    The padding is replaced and not multiplied by zero: a NaN in it would reach the gradients even
    though no output depends on it.
    """
    if lengths is None:
        return x
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return x.where(real.view(*real.shape, *[1] * (x.ndim - 2)), 0.0)
