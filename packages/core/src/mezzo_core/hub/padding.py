"""Rows with padding anywhere, as a tokenizer makes them, put as our modules take them."""

from typing import NamedTuple

import torch
from torch import Tensor


class Padding(NamedTuple):
    """Where the padding of a batch is, and how to move it to the end of every row.

    Attributes:
        real: (B, T) bool, which tokens are no padding.
        lengths: (B,) int64, how many they are in each row.
        order: (B, T) int64, where each token of a moved row was.
    """

    real: Tensor
    lengths: Tensor
    order: Tensor

    @classmethod
    def of(cls, real: Tensor) -> "Padding | None":
        """Describe the padding of a mask (B, T); None if there is none."""
        real = real.bool()
        if real.all():
            return None
        order = real.logical_not().int().argsort(dim=1, stable=True)
        return cls(real, real.sum(1), order)

    def to_end(self, x: Tensor) -> Tensor:
        """Move the padding of x (B, T, ...) to the end of every row, as zeros."""
        shape = (*self.real.shape, *[1] * (x.ndim - 2))
        x = x.masked_fill(~self.real.view(shape), 0)
        return x.gather(1, self.order.view(shape).expand_as(x))

    def in_place(self, y: Tensor) -> Tensor:
        """Move y (B, T, C) back to where its tokens were."""
        return y.gather(1, self.order.argsort(1)[:, :, None].expand_as(y))

    def last(self, y: Tensor) -> Tensor:
        """Return each moved row's last real token, (B, 1, C); any token of a row without one."""
        last = (self.lengths - 1).clamp(min=0)[:, None, None]
        return y.gather(1, last.expand(-1, 1, y.shape[2]))

    def is_end(self) -> Tensor:
        """Tell which places of a moved row are padding, (B, T)."""
        places = torch.arange(self.real.shape[1], device=self.real.device)
        return places >= self.lengths[:, None]
