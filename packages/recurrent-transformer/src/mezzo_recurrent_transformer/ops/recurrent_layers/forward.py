"""The tiled forward: tiles of S tokens along the wavefront of the layers."""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager import Keys
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.parts import Matrices, product
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tile, Tiling, padded


class Forward(NamedTuple):
    """What the forward gives."""

    z: Tensor
    """(n, B, padded T, C): the outputs of all layers."""
    k: Tensor
    """(n, B, P + padded T, C): the persistent keys, those of the past first."""
    v: Tensor


class Stored(NamedTuple):
    """Pairs of all tokens of a row: what came before, and room for those of this call."""

    k: Tensor
    v: Tensor
    seen: Tensor | None

    @classmethod
    def of(
        cls, k: Tensor | None, v: Tensor | None, seen: Tensor | None, shape: tuple[int, ...],
        like: Tensor,
    ) -> "Stored":
        """Return room for (n, B, padded T, C) pairs after the past's (n, B, P, C)."""
        if k is None or v is None:
            return cls(like.new_empty(shape), like.new_empty(shape), None)
        room = like.new_zeros(shape)
        return cls(*(torch.cat([old.to(like.dtype), room], 2) for old in (k, v)), seen)

    def before(self, tile: Tile, S: int) -> Keys:
        """Return what a tile's queries see of the tokens before the tile."""
        layers = slice(tile.first, tile.end)
        return Keys(self.k[layers], self.v[layers], self.seen, (tile.step - tile.first) * S)

    def take(self, given: Tensor, tile: Tile, tiling: Tiling) -> Tensor:
        """Return what a tensor like k (n, B, P + T, C) has for a tile, (m, S, B, C)."""
        given = padded(given, self.k.shape[2])
        slots = [self._slots(layer, tile, tiling.S) for layer in range(tile.first, tile.end)]
        return torch.stack(
            [
                given[tile.first + i].gather(1, slot).transpose(0, 1)
                for i, slot in enumerate(slots)
            ]
        )

    def put(self, k: Tensor, v: Tensor, tile: Tile, tiling: Tiling) -> None:
        """Store a tile's pairs (m, S, B, C)."""
        if self.seen is None:
            tiling.view(self.k, tile).copy_(k)
            tiling.view(self.v, tile).copy_(v)
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


def forward(
    x: Tensor,
    weights: Matrices,
    slopes: Tensor,
    past: tuple[Tensor, Tensor, Tensor] | None,
    form: Form,
    parts: ModuleType,
) -> Forward:
    """Run all layers over x (B, T, C).

    Args:
        x: the input of the first layer.
        weights: of the n layers, in the dtype of the products.
        slopes: (H,) of ALiBi.
        past: k and v (n, B, P, C) of earlier tokens, and their numbers (B,).
        form: the options.
        parts: `eager` or `triton`.
    """
    B, T, C = x.shape
    n = weights.o.shape[0]
    tiling = Tiling.of(n, T, form.block_size)
    form = form._replace(block_size=min(form.block_size, T))
    x = padded(x, tiling.padded)
    shape = (n, B, tiling.padded, C)
    z = x.new_empty(shape)
    stored = Stored.of(*(past or (None, None, None)), shape, weights.o)
    for tile in tiling:
        w = weights.of_layers(tile.first, tile.end)
        inputs = take_inputs(x, z, tile, tiling)
        q, kt, vt = project(inputs, w, form, parts)[2:]
        o, lse = parts.attend_earlier(q, stored.before(tile, tiling.S), slopes, form)
        outputs, k, v = run_tile(inputs, q, kt, vt, o, lse, w, slopes, form, parts)
        tiling.view(z, tile).copy_(outputs)
        stored.put(k, v, tile, tiling)
    return Forward(z, stored.k, stored.v)


def take_inputs(x: Tensor, z: Tensor, tile: Tile, tiling: Tiling) -> Tensor:
    """Return a tile's inputs (m, S, B, C): of x for the first layer, else of the layer below."""
    S, first = tiling.S, tile.first
    inputs = x.new_empty(tile.end - first, S, *x.shape[::2])
    if first == 0:
        inputs[0] = x[:, tile.step * S : (tile.step + 1) * S].transpose(0, 1)
        first = 1
    if first < tile.end:
        below = tile._replace(first=first)
        inputs[first - tile.first :] = tiling.view(z, below, -1)
    return inputs


class Projected(NamedTuple):
    """The projections of a tile's inputs."""

    normed: Tensor
    """(m, S, B, C)."""
    raw: Tensor
    """(m, S, B, 3C): q, k and v before the norms of q and k."""
    q: Tensor
    kt: Tensor
    vt: Tensor


def project(inputs: Tensor, w: Matrices, form: Form, parts: ModuleType) -> Projected:
    """Make queries and temporary pairs of a tile's inputs (m, S, B, C)."""
    normed = parts.normed(inputs, w.n1, form, w.o.dtype)
    raw = product(normed, w.qkv)
    q, k, v = raw.chunk(3, -1)
    q, k = parts.normed(q, w.q_norm, form, q.dtype), parts.normed(k, w.k_norm, form, k.dtype)
    return Projected(normed, raw, q, k, v.contiguous())


def run_tile(
    inputs: Tensor,
    q: Tensor,
    kt: Tensor,
    vt: Tensor,
    o: Tensor,
    lse: Tensor,
    w: Matrices,
    slopes: Tensor,
    form: Form,
    parts: ModuleType,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the steps of a tile one after another; return z, k and v (m, S, B, C)."""
    z, k, v = torch.empty_like(inputs), torch.empty_like(q), torch.empty_like(q)
    dtype, acc = q.dtype, o.dtype
    r, b = form.residual_scale, form.block_size
    for step in range(inputs.shape[1] // b):
        rows = slice(step * b, (step + 1) * b)
        a = parts.attend_step(q, kt, vt, k, v, o, lse, slopes, form, step)
        h, n = parts.add_normed(inputs[:, rows], product(a, w.o), r, w.n2, form, acc, dtype)
        mlp = product(parts.gelu(product(n, w.up)), w.down)
        z[:, rows], n = parts.add_normed(
            h, mlp, r, w.n1, form, inputs.dtype, dtype, form.persistent_norm
        )
        k[:, rows], v[:, rows] = parts.split_pair(product(n, w.kv), w.k_norm, form)
    return z, k, v
