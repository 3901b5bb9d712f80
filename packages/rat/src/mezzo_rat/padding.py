"""Padding on the right of a row: tokens that must reach nothing real, whatever they hold."""

import torch
from torch import Tensor


def without_padding(x: Tensor, lengths: Tensor | None) -> Tensor:
    """Return x (B, T, ...) with zeros after the `lengths` (B,) real tokens of each row.

    Replaced, not multiplied: NaN in the padding would reach gradients even where no output sees it.
    """
    if lengths is None:
        return x
    real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return x.where(real.view(*real.shape, *[1] * (x.ndim - 2)), 0.0)
