"""How the layers' tokens are cut into tiles that run one after another: the wavefront."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

SHORTEST = 16
"""Tokens of a tile, at least: a tile's keys are read once for all its queries."""


class Tile(NamedTuple):
    """S tokens of each of m layers: layer l works on the tokens from (step - l) S on."""

    step: int
    first: int
    """The first layer."""
    end: int
    """The layer after the last."""


@dataclass(frozen=True)
class Tiling:
    """The wavefront of n layers over T tokens."""

    n: int
    T: int
    S: int
    """Tokens of a tile, a multiple of the block size b."""

    @classmethod
    def of(cls, n: int, T: int, block_size: int) -> "Tiling":
        """Return the tiling for `block_size` b."""
        b = min(block_size, T)
        wanted = -(-SHORTEST // b) * b
        return cls(n, T, min(wanted, -(-T // b) * b))

    @property
    def num_tiles(self) -> int:
        """Tiles of a layer."""
        return -(-self.T // self.S)

    @property
    def padded(self) -> int:
        """Tokens of all tiles of a layer."""
        return self.num_tiles * self.S

    def __iter__(self) -> Iterator[Tile]:
        """Yield the tiles, n - 1 more than a layer has: each has up to n layers."""
        for step in range(self.num_tiles + self.n - 1):
            yield Tile(step, max(0, step - self.num_tiles + 1), min(self.n, step + 1))

    def view(self, tensor: Tensor, tile: Tile, layers: int = 0) -> Tensor:
        """Return a tile (m, S, B, C) of (n, B, padded T, C), as a view.

        `layers` shifts it: the tile of layer l is that of the tensor's layer l + `layers`.
        """
        assert tensor.is_contiguous()
        _, B, T, C = tensor.shape
        first = tile.first + layers
        start = first * B * T * C + (tile.step - tile.first) * self.S * C
        sizes = (tile.end - tile.first, self.S, B, C)
        strides = (B * T * C - self.S * C, C, T * C, 1)
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + start)


def copy_rows(out: Tensor, x: Tensor) -> None:
    """Copy x (..., C) into `out`, 16 bytes at a time: a strided copy goes by single elements."""
    ratio = 16 // x.element_size()
    if out.dtype == x.dtype and x.shape[-1] % ratio == 0:
        out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x)


def padded(x: Tensor, tokens: int, dim: int = -2) -> Tensor:
    """Append zeros, so that there are so many tokens; contiguous."""
    missing = tokens - x.shape[dim]
    if missing == 0:
        return x.contiguous()
    zeros = list(x.shape)
    zeros[dim] = missing
    return torch.cat([x, x.new_zeros(zeros)], dim)
