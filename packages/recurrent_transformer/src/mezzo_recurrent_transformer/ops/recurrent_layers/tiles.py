"""How tokens are cut: packed sequences into batches, and the layers' tokens into tiles.

The layers' tiles run one after another, as a wavefront.

A tile consists of leaves. Before its steps, all its queries attend at once to the tokens before the
tile. Each step attends to the earlier tokens of its own leaf. In between, as in the paper's
Algorithm 1, leaves attend to leaves: once the first j leaves are done, the next 2^i attend to the
last 2^i of these, where 2^i is the largest power of two that divides j.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Past
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Keys

LEAF = 16
"""Fewest tokens of a leaf."""
LONGEST = 64
"""Most tokens of a tile of several leaves; all its queries share one reading of earlier keys."""
# The next two are chosen by counting bytes and steps; no others were timed.
LARGEST = 2**14
"""Most tokens of such a tile in all rows: its memory grows with them."""
MANY_ROWS = 256
"""With so many rows a step should keep a GPU busy, even while some layers wait."""


def leaf_size(block_size: int) -> int:
    """Return how many tokens a leaf has: whole blocks."""
    return ceil_div(LEAF, block_size) * block_size


def leaf_of(place: int, S: int, block_size: int) -> range:
    """Return the tokens of the leaf around a place in a tile of S tokens."""
    leaf = leaf_size(block_size)
    first = place // leaf * leaf
    return range(first, min(first + leaf, S))


def leaves(S: int, block_size: int) -> list[range]:
    """Return the tokens of each leaf of a tile of S tokens."""
    return [leaf_of(place, S, block_size) for place in range(0, S, leaf_size(block_size))]


def given_by(place: int, leaf: int) -> int:
    """Return how many tokens after `place`, a border of leaves, attend to as many before it."""
    j = place // leaf
    return leaf * (j & -j)


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
    """Tokens of a tile: a leaf's, times a power of two."""

    @classmethod
    def of(cls, n: int, B: int, T: int, block_size: int, *, backward: bool = False) -> "Tiling":
        """Return the tiling of B rows for `block_size` b.

        Tiles are as long as they can be without padding, much memory, or many more steps: the last
        layer begins n - 1 tiles after the first. A backward may take more steps: it has more work
        for each tile, such as adding to the gradients of all weights.
        """
        b = min(block_size, T)
        S = min(leaf_size(b), ceil_div(T, b) * b)
        longest = min(LONGEST, LARGEST // max(B, 1))
        most_waiting = T if backward or B >= MANY_ROWS else T // 8
        while longest >= 2 * S and ceil_div(T, S) % 2 == 0 and 2 * S * (n - 1) <= most_waiting:
            S *= 2
        return cls(n, T, S)

    @property
    def num_tiles(self) -> int:
        """Tiles of a layer."""
        return ceil_div(self.T, self.S)

    @property
    def padded(self) -> int:
        """Tokens of all tiles of a layer."""
        return self.num_tiles * self.S

    def __iter__(self) -> Iterator[Tile]:
        """Yield the tiles, n - 1 more than a layer has: each has up to n layers."""
        for step in range(self.num_tiles + self.n - 1):
            yield Tile(step, max(0, step - self.num_tiles + 1), min(self.n, step + 1))

    def view(self, tensor: Tensor, tile: Tile) -> Tensor:
        """Return a tile (m, S, B, C) of (n, B, padded T, C), as a view."""
        assert tensor.is_contiguous()
        _, B, T, C = tensor.shape
        start = tile.first * B * T * C + (tile.step - tile.first) * self.S * C
        sizes = (tile.end - tile.first, self.S, B, C)
        strides = (B * T * C - self.S * C, C, T * C, 1)
        return tensor.as_strided(sizes, strides, tensor.storage_offset() + start)


def copy_rows(out: Tensor, x: Tensor) -> None:
    """Copy x (..., C) into `out`, 16 bytes at a time: a strided copy goes by single elements."""
    ratio = 16 // x.element_size()
    # A caller's x may begin anywhere in its storage, and an axis of size 1 may have any stride.
    starts = [step for t in (out, x) for step in (t.storage_offset(), *t.stride()[:-1])]
    if out.dtype == x.dtype and all(size % ratio == 0 for size in (x.shape[-1], *starts)):
        out, x = out.view(torch.complex128), x.view(torch.complex128)
    out.copy_(x)


def padded(x: Tensor, tokens: int) -> Tensor:
    """Append zeros to x (..., T, C) up to this many tokens; contiguous."""
    *rest, T, C = x.shape
    if tokens == T:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(*rest, tokens - T, C)], -2)


class Stored(NamedTuple):
    """Pairs of all tokens of a row: what came before, and room for those of this call."""

    k: Tensor
    v: Tensor
    seen: Tensor | None

    @classmethod
    def of(cls, past: Past | None, shape: tuple[int, ...], like: Tensor) -> "Stored":
        """Return room for (n, B, padded T, C) pairs after the past's (n, B, P, C)."""
        if past is None:
            return cls(like.new_empty(shape), like.new_empty(shape), None)
        k, v, seen = past
        room = like.new_zeros(shape)
        k, v = (torch.cat([old.to(like.dtype), room], 2) for old in (k, v))
        return cls(k, v, seen)

    def before(self, tile: Tile, S: int) -> Keys:
        """Return what a tile's queries see of the tokens before the tile."""
        layers = slice(tile.first, tile.end)
        return Keys(self.k[layers], self.v[layers], self.seen, (tile.step - tile.first) * S)

    def take(self, given: Tensor, tile: Tile, tiling: Tiling) -> Tensor:
        """Return a tile's part (m, S, B, C) of gradients like k (n, B, P + T, C).

        It is 0 after the last token, although a short row has slots left there.
        """
        given = padded(given, self.k.shape[2])
        parts = []
        for layer in range(tile.first, tile.end):
            part = given[layer].gather(1, self._slots(layer, tile, tiling.S)).transpose(0, 1)
            part[tiling.T - (tile.step - layer) * tiling.S :] = 0
            parts.append(part)
        return torch.stack(parts)

    def put(self, k: Tensor, v: Tensor, tile: Tile, tiling: Tiling) -> None:
        """Store a tile's pairs (m, S, B, C)."""
        if self.seen is None:
            copy_rows(tiling.view(self.k, tile), k)
            copy_rows(tiling.view(self.v, tile), v)
            return
        for layer in range(tile.first, tile.end):
            slot = self._slots(layer, tile, tiling.S)
            for stored, new in ((self.k, k), (self.v, v)):
                stored[layer].scatter_(1, slot, new[layer - tile.first].transpose(0, 1))

    def _slots(self, layer: int, tile: Tile, S: int) -> Tensor:
        """Return the slots of a layer's tile, (B, S, C)."""
        assert self.seen is not None
        place = (tile.step - layer) * S + torch.arange(S, device=self.k.device)
        return (self.seen[:, None] + place)[..., None].expand(-1, -1, self.k.shape[-1])


def batches_of(cu_seqlens: Tensor) -> list[Tensor]:
    """Group packed sequences into batches, so that at most half of a batch is padding.

    A batch holds the sequences whose lengths are between two powers of two. So all batches together
    take fewer than three times the steps of the longest sequence alone. The call waits for the GPU.

    Args:
        cu_seqlens: (S + 1,) borders.

    Returns:
        For each batch the indices (rows, longest) of its tokens; T stands for padding.
    """
    borders = cu_seqlens.tolist()
    groups: dict[int, list[tuple[int, int]]] = {}
    for begin, end in pairwise(borders):
        if end > begin:
            groups.setdefault((end - begin - 1).bit_length(), []).append((begin, end - begin))
    batches = []
    for _, sequences in sorted(groups.items()):
        begins, sizes = torch.tensor(sequences, device=cu_seqlens.device).T
        place = torch.arange(int(sizes.max()), device=cu_seqlens.device)
        batches.append(torch.where(place < sizes[:, None], begins[:, None] + place, borders[-1]))
    return batches


def take_batch(packed: Tensor, index: Tensor) -> Tensor:
    """Return the rows of a batch (..., rows, longest, C) from (..., 1, T, C), zeros for padding."""
    tokens = packed.squeeze(-3)
    room = torch.cat([tokens, torch.zeros_like(tokens[..., :1, :])], -2)
    return room[..., index, :]


def put_batch(batch: Tensor, index: Tensor, packed: Tensor) -> None:
    """Write the tokens of a batch (..., rows, longest, C) into (..., 1, T, C); padding is lost."""
    real = index.flatten() < packed.shape[-2]
    chosen = index.flatten()[real]
    packed[..., 0, chosen, :] = batch.flatten(-3, -2)[..., real, :].to(packed.dtype)
