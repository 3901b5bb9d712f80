"""The tiled forward: tiles of S tokens along the wavefront of the layers."""

from typing import NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.operands import ForwardBuffers, product
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import (
    Stored,
    Tiling,
    copy_rows,
    given_by,
    leaves,
    padded,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import (
    BackwardWork,
    Call,
    ForwardWork,
    workspace_for,
)


class Forward(NamedTuple):
    """What the forward gives."""

    stream: Tensor
    """(`kept(n)`, B, padded T, C): all layers' outputs, after x if there are several layers."""
    k: Tensor
    """(n, B, P + padded T, C): the persistent keys, those of the past first."""
    v: Tensor


def kept(n: int) -> int:
    """Return the length of `Forward.stream` for n layers."""
    return n + 1 if n > 1 else n


def forward(x: Tensor, call: Call) -> Forward:
    """Run all layers over x (B, T, C)."""
    (B, T, C), n = x.shape, call.weights.o.shape[0]
    call = call.in_blocks_of(T)
    tiling = Tiling.of(n, B, T, call.form.block_size)
    x = padded(x, tiling.padded)
    stream = x.new_empty(kept(n), B, tiling.padded, C)
    if n > 1:
        stream[0] = x
    z = stream[-n:]
    stored = Stored.of(call.past, tuple(z.shape), call.weights.o)
    of_all = workspace_for(ForwardBuffers, x, tiling.S, call)
    for tile in tiling:
        work = of_all.of_layers(tile.first, tile.end)
        at, its = work.buffers.attending, work.buffers.stream
        if tile.first == 0:
            begin = tile.step * tiling.S
            copy_rows(its[0], x[:, begin : begin + tiling.S].transpose(0, 1))
        project(its[:-1], work)
        call.parts.attend_earlier(work, stored.before(tile, tiling.S))
        of_all.run(run_tile, tile)
        copy_rows(tiling.view(z, tile), its[1:])
        stored.put(at.k, at.v, tile, tiling)
    return Forward(stream, stored.k, stored.v)


def project(inputs: Tensor, work: ForwardWork | BackwardWork) -> tuple[Tensor, Tensor]:
    """Write q, kt and vt of a tile's inputs (m, S, B, C).

    Returns:
        The normalized inputs; and q, k and v before the norms of q and k, (m, S, B, 3C).
    """
    at, w, form = work.buffers.attending, work.w, work.form
    C = inputs.shape[-1]
    normed = torch.empty_like(at.q)
    work.parts.normed(inputs, w.n1, form, normed)
    raw = product(normed, w.qkv)
    work.parts.normed(raw[..., :C], w.q_norm, form, at.q)
    work.parts.split_pair(raw[..., C:], w.k_norm, form, at.kt, at.vt)
    return normed, raw


def run_tile(work: ForwardWork) -> None:
    """Run the steps of a tile one after another; write z and the persistent pairs."""
    S = work.buffers.attending.q.shape[1]
    for leaf in leaves(S, work.form.block_size):
        if not work.parts.narrow_leaf(work, leaf):
            run_leaf(work, leaf)
        if leaf.stop < S:
            work.parts.attend_leaves(work, leaf.stop, given_by(leaf.stop, len(leaf)))


def run_leaf(work: ForwardWork, leaf: range) -> None:
    """Run the steps of a leaf: its tokens, or blocks, one after another."""
    (stream, at), b = work.buffers, work.form.block_size
    a = torch.empty_like(at.q[:, :b])
    kv = None
    for begin in leaf[::b]:
        rows = slice(begin, begin + b)
        work.parts.attend_step(work, kv, begin // b, a)
        kv = mlp_step(a, stream[:-1, rows], work, stream[1:, rows])
    assert kv is not None
    work.parts.split_pair(kv, work.w.k_norm, work.form, at.k[:, rows], at.v[:, rows])


def mlp_step(a: Tensor, x: Tensor, work: ForwardWork, z: Tensor) -> Tensor:
    """Write the outputs z of a step's tokens, and return Wk n and Wv n (m, b, B, 2C) of n = n1(z).

    a, x and z are (m, b, B, C): the attention's outputs before Wo, the layers' inputs, and their
    outputs. A layer's outputs may overwrite the inputs of the next.
    """
    w, form, parts = work.w, work.form, work.parts
    r, n = form.residual_scale, torch.empty_like(a)
    h = torch.empty_like(a, dtype=accumulation_dtype(a.dtype))
    g = a.new_empty(*a.shape[:3], w.up.shape[1])
    squares = parts.product_add(a, w.o, x, r, w.n2, form, h, n)
    parts.product_gelu(n, w.up, g, squares, form)
    y = parts.product_partial(g, w.down)
    assert y is not None
    parts.add_normed(h, y, r, w.n1, form.of_pairs(), z, n)
    return parts.product(n, w.kv)
