"""The tiled backward: the wavefront in reverse, from the inputs and outputs of the layers."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype, add_product
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager.tile import past_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Past
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import project
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    BackwardBuffers,
    Keys,
    Later,
    Matrices,
    Pairs,
    product,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import (
    Stored,
    Tile,
    Tiling,
    copy_rows,
    given_by,
    leaves,
    padded,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import (
    BackwardWork,
    Call,
    workspace_for,
)


class Kept(NamedTuple):
    """The inputs and outputs of all layers, as the forward keeps them."""

    x: Tensor
    """For one layer its inputs (B, T, C); for several x and all outputs, (n + 1, B, T, C)."""
    z: Tensor | None
    """For one layer its outputs; for several None: a layer's outputs are the next one's inputs."""

    def map(self, change: Callable[[Tensor], Tensor]) -> "Kept":
        """Apply `change` to both."""
        return Kept(change(self.x), None if self.z is None else change(self.z))


class Gradients(NamedTuple):
    """What the backward gives."""

    x: Tensor
    """(B, T, C)."""
    weights: Matrices
    """In float32 (float64 for float64)."""
    past: Pairs | None
    """The gradients of k and v (n, B, P, C)."""


def backward(dz: Tensor, dpairs: Pairs | None, kept: Kept, call: Call) -> Gradients:
    """Compute all gradients from what the forward of a call kept.

    `dz` (B, T, C) is the gradient of the last layer's outputs. `dpairs` are those of the persistent
    pairs (n, B, P + T, C), which a forward with a past returns.
    """
    (B, T, _), n = dz.shape, call.weights.o.shape[0]
    acc = accumulation_dtype(call.weights.o.dtype)
    call = call.in_blocks_of(T)
    tiling = Tiling.of(n, B, T, call.form.block_size, backward=True)
    S, Tp = tiling.S, tiling.padded
    dz, kept = padded(dz, Tp), kept.map(lambda t: padded(t, Tp))
    x, z = (kept.x[:-1], kept.x[1:]) if kept.z is None else (kept.x[None], kept.z[None])
    of_all = workspace_for(BackwardBuffers, x[0], S, call)
    pairs, stored = _all_pairs(z, of_all, call.past, tiling)
    queries = _room_for_queries(pairs, of_all)
    dx = torch.empty_like(dz)
    sums = call.weights.map(lambda w: w.new_zeros(w.shape, dtype=acc))
    for tile in reversed(list(tiling)):
        work = of_all.of_layers(tile.first, tile.end)
        t, at = work.buffers, work.buffers.attending
        inputs, keys = tiling.view(x, tile), stored.before(tile, S)
        for own, of_layers in ((t.z, z), (at.k, pairs.k), (at.v, pairs.v)):
            copy_rows(own, tiling.view(of_layers, tile))
        again = _forward_again(inputs, work, keys)

        # First the gradients from the layer above and from later tokens, then the steps.
        if tile.end == n:
            begin = (tile.step - n + 1) * S
            t.dstream[-1] = dz[:, begin : begin + S].transpose(0, 1)
        work.parts.pairs_bwd(work, _later(queries, tile, S))
        if dpairs is not None:
            t.dk.add_(stored.take(dpairs.k, tile, tiling))
            t.dv.add_(stored.take(dpairs.v, tile, tiling))
        of_all.run(run_tile_bwd, tile)
        work.parts.head_products(t.do, at.o, t.delta)
        found = (at.q, t.do, at.lse, t.delta)
        for total, part in zip(queries[:4], found, strict=True):
            copy_rows(tiling.view(total, tile), part)

        _inputs_and_weights_bwd(inputs, work, again, sums.of_layers(tile.first, tile.end), keys)
        if tile.first == 0:
            begin = tile.step * S
            dx[:, begin : begin + S] = t.dstream[0].transpose(0, 1)
    dpast = None
    if call.past is not None:
        dpast = _past_bwd(call.past, queries, dpairs, T, of_all)
    return Gradients(dx[:, :T], sums, dpast)


class Again(NamedTuple):
    """The part of a tile's forward that only the gradients of weights and inputs need."""

    normed: Tensor
    """(m, S, B, C): n1(x)."""
    qkv: Tensor
    """(m, S, B, 3C): before the norms of q and k."""
    mlp_normed: Tensor
    """n2(h)."""
    pairs_normed: Tensor
    """n1(z)."""


def _all_pairs(
    z: Tensor, of_all: BackwardWork, past: Past | None, tiling: Tiling
) -> tuple[Pairs, Stored]:
    """Make the persistent pairs of all tokens from the outputs (n, B, padded T, C)."""
    shape, like, C, form = tuple(z.shape), of_all.w.o, z.shape[-1], of_all.form
    stored = Stored.of(past, shape, like)
    pairs = Pairs(*(stored[:2] if past is None else (like.new_empty(shape) for _ in range(2))))
    for layer in range(len(z)):  # n1(z) of all of them would take as much memory as z
        here = slice(layer, layer + 1)
        w, k = of_all.w.of_layers(layer, layer + 1), pairs.k[here]
        normed = _pairs_normed(z[here], w, of_all)
        product(normed, w.kv[:, :C], k)
        product(normed, w.kv[:, C:], pairs.v[here])
        of_all.parts.normed(k, w.k_norm, form, k)
    if past is not None:
        for tile in tiling:
            stored.put(tiling.view(pairs.k, tile), tiling.view(pairs.v, tile), tile, tiling)
    return pairs, stored


def _pairs_normed(outputs: Tensor, w: Matrices, work: BackwardWork) -> Tensor:
    normed = outputs.new_empty(outputs.shape, dtype=w.o.dtype)
    work.parts.normed(outputs, w.n1, work.form.of_pairs(), normed)
    return normed


def _room_for_queries(pairs: Pairs, of_all: BackwardWork) -> Later:
    """Return room for the queries of all tokens: q, do (n, B, padded T, C), lse and delta.

    A token's query overwrites its pair: only later tokens attend to the pair, and they are done.
    """
    shape, dtype = (*pairs.k.shape[:3], of_all.form.num_heads), of_all.buffers.delta.dtype
    lse, delta = (pairs.k.new_empty(shape, dtype=dtype) for _ in range(2))
    return Later(pairs.k, pairs.v, lse, delta, begin=0)


def _later(queries: Later, tile: Tile, S: int) -> Later:
    """Return the queries of the tokens after a tile."""
    q, do, lse, delta = (t[tile.first : tile.end] for t in queries[:4])
    return Later(q, do, lse, delta, begin=(tile.step - tile.first + 1) * S)


def _forward_again(inputs: Tensor, work: BackwardWork, keys: Keys) -> Again:
    """Compute the rest of a tile's forward, at once: its persistent pairs are known."""
    t, at, w, form = work.buffers, work.buffers.attending, work.w, work.form
    pairs_normed = _pairs_normed(t.z, w, work)
    product(pairs_normed, w.kv[:, : at.q.shape[-1]], t.raw)
    normed, qkv = project(inputs, work)
    work.parts.attend_tile(work, keys)
    mlp_normed = torch.empty_like(at.q)
    attended = product(at.o, w.o)[None]
    work.parts.add_normed(inputs, attended, form.residual_scale, w.n2, form, t.h, mlp_normed)
    product(mlp_normed, w.up, t.u)
    return Again(normed, qkv, mlp_normed, pairs_normed)


def run_tile_bwd(work: BackwardWork) -> None:
    """Run the steps of a tile backwards, one after another."""
    t, at, b = work.buffers, work.buffers.attending, work.form.block_size
    S = t.z.shape[1]
    for leaf in reversed(leaves(S, b)):
        if leaf.stop < S:  # the leaf after this one is done
            new = slice(leaf.stop, leaf.stop + b)
            work.parts.head_products(t.do[:, new], at.o[:, new], t.delta[:, new])
            work.parts.leaves_bwd(work, leaf.stop, given_by(leaf.stop, len(leaf)))
        if not work.parts.narrow_leaf_bwd(work, leaf):
            for begin in reversed(leaf[::b]):
                work.parts.pairs_step_bwd(work, begin // b)
                _mlp_step_bwd(work, slice(begin, begin + b))


def _mlp_step_bwd(work: BackwardWork, rows: slice) -> None:
    """Backpropagate from the pairs and the outputs of a step to its attention outputs."""
    t, w, form, parts = work.buffers.of_step(rows), work.w, work.form, work.parts
    r, dz = form.residual_scale, torch.empty_like(t.h)
    partial = parts.product_partial(t.dpair, w.kv.mT, t.dnormed)
    parts.normed_bwd(
        t.dnormed, t.z, w.n1, form.of_pairs(), t.dstream[1:], r, dz, t.dz_scaled, partial
    )
    parts.product_gelu_bwd(t.dz_scaled, w.down.mT, t.u, t.du)
    partial = parts.product_partial(t.du, w.up.mT, t.dhn)
    parts.normed_bwd(t.dhn, t.h, w.n2, form, dz, r, t.dh, t.dh_scaled, partial)
    parts.product(t.dh_scaled, w.o.mT, t.do)


def _inputs_and_weights_bwd(
    inputs: Tensor, work: BackwardWork, again: Again, sums: Matrices, keys: Keys
) -> None:
    """Backpropagate through queries and temporary pairs; add to the gradients of all weights."""
    t, at, w, form, parts = work.buffers, work.buffers.attending, work.w, work.form, work.parts
    dqkv = torch.empty_like(again.qkv)
    parts.attend_tile_bwd(work, keys, dqkv)
    (q, kt, _), (dq, dkt, _) = (x.chunk(3, -1) for x in (again.qkv, dqkv))
    for dy, x, weight, total in ((dq, q, w.q_norm, sums.q_norm), (dkt, kt, w.k_norm, sums.k_norm)):
        if total is not None:
            parts.add_norm_weight_grad(dy, x, form, total)
        parts.normed_bwd(dy, x, weight, form, None, 1.0, None, dy)
    dnormed = product(dqkv, w.qkv.mT)
    parts.normed_bwd(dnormed, inputs, w.n1, form, t.dh, 1.0, t.dstream[:-1], None)

    _add_outer(sums.qkv, dqkv, again.normed)
    _add_outer(sums.kv, t.dpair, again.pairs_normed)
    _add_outer(sums.o, t.dh_scaled, at.o)
    _add_outer(sums.up, t.du, again.mlp_normed)
    _add_outer(sums.down, t.dz_scaled, t.u)
    if sums.n1 is None or sums.n2 is None or sums.k_norm is None:
        return
    parts.add_norm_weight_grad(dnormed, inputs, form, sums.n1)
    if form.persistent_norm:
        parts.add_norm_weight_grad(t.dnormed, t.z, form, sums.n1)
    parts.add_norm_weight_grad(t.dhn, t.h, form, sums.n2)
    parts.add_norm_weight_grad(t.dk, t.raw, form, sums.k_norm)


def _add_outer(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add the gradient of a product's weight to `total` (m, N, K), in the precision of `total`."""
    add_product(total, dy.flatten(1, -2).mT, x.flatten(1, -2))


def _past_bwd(
    past: Past, queries: Later, dpairs: Pairs | None, T: int, of_all: BackwardWork
) -> Pairs:
    """Return the gradients of the past's k and v (n, B, P, C)."""
    q, do, lse, delta = (t[:, :, :T] for t in queries[:4])
    found = past_bwd(past, Later(q, do, lse, delta, begin=0), of_all.slopes, of_all.form)
    if dpairs is not None:  # the forward returned them too
        for total, given in zip(found, of_past(dpairs, past), strict=True):
            total += given
    return found


def of_past(dpairs: Pairs, past: Past) -> Pairs:
    """Return the part of `dpairs` (n, B, P + T, C) for the pairs of earlier calls, else 0."""
    P = past.k.shape[2]
    seen = (torch.arange(P, device=past.lengths.device) < past.lengths[:, None])[..., None]
    return Pairs(*(given[:, :, :P].where(seen, 0) for given in dpairs))
