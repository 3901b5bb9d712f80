"""The persistent pairs of all tokens of a call, and of those before it."""

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Keys
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tile, Tiling, copy_rows, padded


class Stored(NamedTuple):
    """Pairs of all tokens of a row: what came before, and room for those of this call."""

    k: Tensor
    v: Tensor
    seen: Tensor | None

    @classmethod
    def of(
        cls, past: tuple[Tensor, Tensor, Tensor] | None, shape: tuple[int, ...], like: Tensor
    ) -> "Stored":
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
        """Return what a tensor like k (n, B, P + T, C) has for a tile, (m, S, B, C).

        It is 0 after the last token. A short row has slots there too, but none of a token.
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
