"""The tiled backward: the wavefront in reverse, from the inputs and outputs of the layers."""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.backward_steps import run_tile_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.buffers import BackwardBuffers
from mezzo_recurrent_transformer.ops.recurrent_layers.eager import past_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import project
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Keys, Later, Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.products import add_outer, product
from mezzo_recurrent_transformer.ops.recurrent_layers.room import room_for
from mezzo_recurrent_transformer.ops.recurrent_layers.stored import Stored
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tiling, copy_rows, padded


class Gradients(NamedTuple):
    """What the backward gives."""

    x: Tensor
    """(B, T, C)."""
    weights: Matrices
    """In float32 (float64 for float64)."""
    past: tuple[Tensor, Tensor] | None
    """Of k and v (n, B, P, C)."""


def backward(
    dz: Tensor,
    dpairs: tuple[Tensor, Tensor] | None,
    kept: Sequence[Tensor],
    weights: Matrices,
    slopes: Tensor,
    past: tuple[Tensor, Tensor, Tensor] | None,
    form: Form,
    parts: ModuleType,
) -> Gradients:
    """Compute all gradients.

    Args:
        dz: (B, T, C), of the last layer's outputs.
        dpairs: of the persistent pairs (n, B, P + T, C) that a forward with a past gives.
        kept: the stream (n + 1, B, T, C) of x and all layers' outputs; of one layer x and its
            outputs apart, each (B, T, C).
        weights: as in the forward.
        slopes: likewise.
        past: likewise.
        form: likewise.
        parts: likewise.
    """
    (B, T, _), n = dz.shape, weights.o.shape[0]
    acc = accumulation_dtype(weights.o.dtype)
    tiling = Tiling.of(n, B, T, form.block_size)
    S, Tp = tiling.S, tiling.padded
    form = form._replace(block_size=min(form.block_size, T))
    dz, *kept = (padded(t, Tp) for t in (dz, *kept))
    # Of several layers the outputs of one are the inputs of the next.
    x, z = (t[None] for t in kept) if n == 1 else (kept[0][:-1], kept[0][1:])
    room = room_for(BackwardBuffers, x[0], weights, slopes, S, form)
    pairs, stored = _all_pairs(z, weights, past, form, tiling, parts)
    queries = _no_queries(z, form, acc, weights.o)
    dx = torch.empty_like(dz, dtype=acc)
    sums = weights.map(lambda w: w.new_zeros(w.shape, dtype=acc))
    for tile in reversed(list(tiling)):
        first, end = tile.first, tile.end
        buffers, w = room.of_layers(first, end)
        at = buffers.attending
        inputs, keys = tiling.view(x, tile), stored.before(tile, S)
        copied = ((buffers.z, z), (at.k, pairs.k), (at.v, pairs.v), (buffers.raw, pairs.raw))
        for own, of_all in copied:
            copy_rows(own, tiling.view(of_all, tile))
        again = _forward_again(inputs, buffers, w, keys, slopes, form, parts)

        # What comes from above and from later tokens, and then the steps.
        if end == n:
            begin = (tile.step - n + 1) * S
            buffers.dstream[-1] = dz[:, begin : begin + S].transpose(0, 1)
        q, do, lse, delta = (t[first:end] for t in queries)
        later = Later(q, do, lse, delta, begin=(tile.step - first + 1) * S)
        parts.pairs_bwd(at.k, at.v, later, slopes, form, buffers.dk, buffers.dv)
        if dpairs is not None:
            buffers.dk.add_(stored.take(dpairs[0], tile, tiling))
            buffers.dv.add_(stored.take(dpairs[1], tile, tiling))
        room.run(run_tile_bwd, tile, parts)
        parts.head_products(buffers.do, at.o, buffers.delta)
        found = (at.q, buffers.do, at.lse, buffers.delta)
        for total, part in zip(queries, found, strict=True):
            copy_rows(tiling.view(total, tile), part)

        _inputs_and_weights_bwd(
            inputs, buffers, again, w, sums.of_layers(first, end), keys, slopes, form, parts
        )
        if first == 0:
            begin = tile.step * S
            dx[:, begin : begin + S] = buffers.dstream[0].transpose(0, 1)
    dpast = None if past is None else _past_bwd(past, queries, dpairs, T, slopes, form)
    return Gradients(dx[:, :T], sums, dpast)


Queries = tuple[Tensor, Tensor, Tensor, Tensor]
"""q, do (n, B, padded T, C), lse and delta (n, B, padded T, H) of the tokens so far."""


class Pairs(NamedTuple):
    """The persistent pairs of all tokens of the call, (n, B, padded T, C)."""

    k: Tensor
    v: Tensor
    raw: Tensor
    """The keys before their norm."""


class Again(NamedTuple):
    """What of a tile's forward only the gradients of weights and inputs need."""

    normed: Tensor
    """(m, S, B, C): n1(x)."""
    qkv: Tensor
    """(m, S, B, 3C): before the norms of q and k."""
    mlp_normed: Tensor
    """n2(h)."""


def _all_pairs(
    z: Tensor,
    weights: Matrices,
    past: tuple[Tensor, Tensor, Tensor] | None,
    form: Form,
    tiling: Tiling,
    parts: ModuleType,
) -> tuple[Pairs, Stored]:
    """Make the persistent pairs of all tokens from the outputs (n, B, padded T, C)."""
    shape, like, C = tuple(z.shape), weights.o, z.shape[-1]
    stored = Stored.of(past, shape, like)
    k, v = stored[:2] if past is None else (like.new_empty(shape) for _ in range(2))
    pairs = Pairs(k, v, raw=k if form.norm == "none" else torch.empty_like(k))
    for layer in range(len(z)):  # n1(z) of all of them would take as much memory as z
        here = slice(layer, layer + 1)
        w, its = weights.of_layers(layer, layer + 1), Pairs(*(t[here] for t in pairs))
        normed = _pairs_normed(z[here], w, form, parts)
        product(normed, w.kv[:, :C], its.raw)
        product(normed, w.kv[:, C:], its.v)
        if form.norm != "none":
            parts.normed(its.raw, w.k_norm, form, its.k)
    if past is not None:
        for tile in tiling:
            stored.put(tiling.view(k, tile), tiling.view(v, tile), tile, tiling)
    return pairs, stored


def _pairs_normed(outputs: Tensor, w: Matrices, form: Form, parts: ModuleType) -> Tensor:
    normed = outputs.new_empty(outputs.shape, dtype=w.o.dtype)
    parts.normed(outputs, w.n1, form.of_pairs(), normed)
    return normed


def _no_queries(z: Tensor, form: Form, acc: torch.dtype, like: Tensor) -> Queries:
    q, do = (like.new_zeros(z.shape) for _ in range(2))
    heads = (*z.shape[:3], form.num_heads)
    lse, delta = (like.new_zeros(heads, dtype=acc) for _ in range(2))
    return q, do, lse, delta


def _forward_again(
    inputs: Tensor,
    buffers: BackwardBuffers,
    w: Matrices,
    keys: Keys,
    slopes: Tensor,
    form: Form,
    parts: ModuleType,
) -> Again:
    """Fill the buffers with the rest of a tile's forward; its pairs are known, so nothing waits."""
    at = buffers.attending
    normed, qkv = project(inputs, w, form, parts, at)
    parts.attend_tile(at, keys, slopes, form)
    mlp_normed = torch.empty_like(at.q)
    scale, attended = form.residual_scale, product(at.o, w.o)
    parts.add_normed(inputs, attended[None], scale, w.n2, form, buffers.h, mlp_normed)
    product(mlp_normed, w.up, buffers.u)
    return Again(normed, qkv, mlp_normed)


def _inputs_and_weights_bwd(
    inputs: Tensor,
    buffers: BackwardBuffers,
    again: Again,
    w: Matrices,
    sums: Matrices,
    keys: Keys,
    slopes: Tensor,
    form: Form,
    parts: ModuleType,
) -> None:
    """Go back through queries and temporary pairs, and add to all weights' gradients."""
    at, dqkv = buffers.attending, torch.empty_like(again.qkv)
    parts.attend_tile_bwd(at, buffers.do, buffers.delta, keys, slopes, form, dqkv)
    (q, kt, _), (dq, dkt, _) = (t.chunk(3, -1) for t in (again.qkv, dqkv))
    for dy, x, weight, total in ((dq, q, w.q_norm, sums.q_norm), (dkt, kt, w.k_norm, sums.k_norm)):
        if total is not None:
            parts.add_norm_weight_grad(dy, x, form, total)
        parts.normed_bwd(dy, x, weight, form, None, 1.0, None, dy)
    dnormed = product(dqkv, w.qkv.mT)
    dinputs = buffers.dstream[:-1]
    parts.normed_bwd(dnormed, inputs, w.n1, form, buffers.dh, 1.0, dinputs, None)

    add_outer(sums.qkv, dqkv, again.normed)
    add_outer(sums.kv, buffers.dpair, _pairs_normed(buffers.z, w, form, parts))
    add_outer(sums.o, buffers.dh_scaled, at.o)
    add_outer(sums.up, buffers.du, again.mlp_normed)
    add_outer(sums.down, buffers.dz_scaled, buffers.u)
    if form.norm == "none":
        return
    parts.add_norm_weight_grad(dnormed, inputs, form, sums.n1)
    if form.persistent_norm:
        parts.add_norm_weight_grad(buffers.dnormed, buffers.z, form, sums.n1)
    parts.add_norm_weight_grad(buffers.dhn, buffers.h, form, sums.n2)
    parts.add_norm_weight_grad(buffers.dk, buffers.raw, form, sums.k_norm)


def _past_bwd(
    past: tuple[Tensor, Tensor, Tensor],
    queries: Queries,
    dpairs: tuple[Tensor, Tensor] | None,
    T: int,
    slopes: Tensor,
    form: Form,
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the past's k and v (n, B, P, C)."""
    q, do, lse, delta = (t[:, :, :T] for t in queries)
    found = past_bwd(past, Later(q, do, lse, delta, begin=0), slopes, form)
    if dpairs is not None:  # the forward returned them too
        for total, given in zip(found, of_past(dpairs, past), strict=True):
            total += given
    return found


def of_past(
    dpairs: tuple[Tensor, Tensor], past: tuple[Tensor, Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return what gradients like k (n, B, P + T, C) have for the pairs of earlier calls."""
    P = past[0].shape[2]
    seen = (torch.arange(P, device=past[2].device) < past[2][:, None])[..., None]
    dk, dv = (given[:, :, :P].where(seen, 0) for given in dpairs)
    return dk, dv
