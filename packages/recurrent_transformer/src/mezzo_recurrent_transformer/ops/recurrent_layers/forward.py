"""The tiled forward: tiles of S tokens along the wavefront of the layers."""

from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.buffers import ForwardBuffers
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.mlp import mlp_step
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Attending, Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.products import product
from mezzo_recurrent_transformer.ops.recurrent_layers.room import room_for
from mezzo_recurrent_transformer.ops.recurrent_layers.stored import Stored
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import (
    Tiling,
    copy_rows,
    given_by,
    leaves,
    padded,
)


class Forward(NamedTuple):
    """What the forward gives."""

    stream: Tensor
    """(`kept(n)`, B, padded T, C): the outputs of all layers; of several layers, x before them."""
    k: Tensor
    """(n, B, P + padded T, C): the persistent keys, those of the past first."""
    v: Tensor


def kept(n: int) -> int:
    """Return the length of `Forward.stream`, in which all layers' inputs and outputs are views."""
    return n + 1 if n > 1 else n


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
    tiling = Tiling.of(n, B, T, form.block_size)
    form = form._replace(block_size=min(form.block_size, T))
    x = padded(x, tiling.padded)
    stream = x.new_empty(kept(n), B, tiling.padded, C)
    if n > 1:
        stream[0] = x
    z = stream[-n:]
    stored = Stored.of(past, tuple(z.shape), weights.o)
    room = room_for(ForwardBuffers, x, weights, slopes, tiling.S, form)
    for tile in tiling:
        buffers, w = room.of_layers(tile.first, tile.end)
        at = buffers.attending
        if tile.first == 0:
            begin = tile.step * tiling.S
            copy_rows(buffers.stream[0], x[:, begin : begin + tiling.S].transpose(0, 1))
        project(buffers.stream[:-1], w, form, parts, at)
        parts.attend_earlier(at.q, stored.before(tile, tiling.S), room.slopes, form, at.o, at.lse)
        room.run(run_tile, tile, parts)
        copy_rows(tiling.view(z, tile), buffers.stream[1:])
        stored.put(at.k, at.v, tile, tiling)
    return Forward(stream, stored.k, stored.v)


def project(
    inputs: Tensor, w: Matrices, form: Form, parts: ModuleType, out: Attending
) -> tuple[Tensor, Tensor]:
    """Write q, kt and vt of a tile's inputs (m, S, B, C).

    Returns:
        The normalized inputs; and q, k and v before the norms of q and k, (m, S, B, 3C).
    """
    normed = torch.empty_like(out.q)
    parts.normed(inputs, w.n1, form, normed)
    raw = product(normed, w.qkv)
    parts.split_qkv(raw, w.q_norm, w.k_norm, form, out.q, out.kt, out.vt)
    return normed, raw


def run_tile(
    buffers: ForwardBuffers, w: Matrices, slopes: Tensor, form: Form, parts: ModuleType
) -> None:
    """Run the steps of a tile one after another; write z and the persistent pairs."""
    at, b = buffers.attending, form.block_size
    S = at.q.shape[1]
    for leaf in leaves(S, b):
        if parts.is_narrow(at.q, form):
            parts.narrow_leaf(buffers, w, slopes, form, leaf)
        else:
            run_leaf(buffers, w, slopes, form, leaf, parts)
        if leaf.stop < S:
            parts.attend_leaves(at, slopes, form, leaf.stop, given_by(leaf.stop, len(leaf)))


def run_leaf(
    buffers: ForwardBuffers,
    w: Matrices,
    slopes: Tensor,
    form: Form,
    leaf: range,
    parts: ModuleType,
) -> None:
    """Run the steps of a leaf: what must be done one token, or block, after another."""
    (stream, at), b = buffers, form.block_size
    a = torch.empty_like(at.q[:, :b])
    kv = None
    for begin in leaf[::b]:
        rows = slice(begin, begin + b)
        parts.attend_step(at, kv, w.k_norm, slopes, form, begin // b, a)
        kv = mlp_step(a, stream[:-1, rows], w, form, stream[1:, rows], parts)
    parts.split_pair(kv, w.k_norm, form, at.k[:, rows], at.v[:, rows])
