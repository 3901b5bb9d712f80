"""The tiled backward: the wavefront in reverse, from the inputs and outputs of the layers."""

from types import ModuleType
from typing import NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager import Attending, Later, past_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import Stored, project
from mezzo_recurrent_transformer.ops.recurrent_layers.parts import Matrices, add_outer, product
from mezzo_recurrent_transformer.ops.recurrent_layers.room import room_for
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tile, Tiling, padded


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
    x: Tensor,
    z: Tensor,
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
        x: (B, T, C), the first layer's inputs.
        z: (n, B, T, C), all layers' outputs.
        weights: as in the forward.
        slopes: likewise.
        past: likewise.
        form: likewise.
        parts: likewise.
    """
    (B, T, C), n = x.shape, z.shape[0]
    dtype, acc = weights.o.dtype, accumulation_dtype(weights.o.dtype)
    tiling = Tiling.of(n, T, form.block_size)
    S, Tp = tiling.S, tiling.padded
    form = form._replace(block_size=min(form.block_size, T))
    H, r = form.num_heads, form.residual_scale
    x, z, dz = (padded(t, Tp) for t in (x, z, dz))

    room = room_for(BackwardBuffers, x, weights, slopes, S, form)
    stored = Stored.of(*(past or (None, None, None)), tuple(z.shape), weights.o)
    for tile in tiling:
        buffers, w = room.of_layers(tile.first, tile.end)
        buffers.z.copy_(tiling.view(z, tile))
        persistent_pairs(buffers, w, form, parts)
        stored.put(buffers.attending.k, buffers.attending.v, tile, tiling)

    q_all, do_all = (weights.o.new_zeros(n, B, Tp, C) for _ in range(2))
    lse_all, delta_all = (weights.o.new_zeros(n, B, Tp, H, dtype=acc) for _ in range(2))
    dx = weights.o.new_empty(x.shape, dtype=acc)
    # Gradients of the inputs of each layer's last tile: of the outputs of the layer below.
    passed = weights.o.new_empty(n, S, B, C, dtype=acc)
    sums = weights.map(lambda w: torch.zeros_like(w, dtype=acc))
    for tile in reversed(list(tiling)):
        first, end = tile.first, tile.end
        buffers, w = room.of_layers(first, end)
        at, keys = buffers.attending, stored.before(tile, S)
        # The tile's forward once more; all its keys are known, so nothing waits for anything.
        take_inputs(x, z, tile, tiling, buffers.inputs)
        buffers.z.copy_(tiling.view(z, tile))
        normed, raw = project(buffers.inputs, w, form, parts, at)
        pairs_normed = persistent_pairs(buffers, w, form, parts)
        parts.attend_tile(at, keys, slopes, form)
        mlp_normed = torch.empty_like(at.q)
        parts.add_normed(buffers.inputs, product(at.o, w.o), r, w.n2, form, buffers.h, mlp_normed)
        product(mlp_normed, w.up, buffers.u)

        # What comes from the layer above, and from later tokens.
        buffers.above[:-1] = passed[first + 1 : end]
        if end == n:
            begin = (tile.step - n + 1) * S
            buffers.above[-1] = dz[:, begin : begin + S].transpose(0, 1)
        else:
            buffers.above[-1] = passed[end]
        queries = (q_all, do_all, lse_all, delta_all)
        later = Later(*(t[first:end] for t in queries), (tile.step - first + 1) * S)
        parts.pairs_bwd(at.k, at.v, later, slopes, form, buffers.dk, buffers.dv)
        if dpairs is not None:
            buffers.dk.add_(stored.take(dpairs[0], tile, tiling))
            buffers.dv.add_(stored.take(dpairs[1], tile, tiling))
        room.run(run_tile_bwd, tile, parts)

        # Queries, temporary pairs and weights need no order.
        parts.head_products(buffers.do, at.o, buffers.delta)
        dq, dkt, dvt = (torch.empty_like(at.q) for _ in range(3))
        parts.attend_tile_bwd(at, buffers.do, buffers.delta, keys, slopes, form, dq, dkt, dvt)
        for total, part in zip(queries, (at.q, buffers.do, at.lse, buffers.delta), strict=True):
            tiling.view(total, tile).copy_(part)
        draw, (q_raw, k_raw, _) = torch.empty_like(raw), raw.chunk(3, -1)
        dq_raw, dk_raw, dv_raw = draw.chunk(3, -1)
        parts.normed_bwd(dq, q_raw, w.q_norm, form, None, 1.0, None, dq_raw)
        parts.normed_bwd(dkt, k_raw, w.k_norm, form, None, 1.0, None, dk_raw)
        dv_raw.copy_(dvt)
        dnormed = product(draw, w.qkv.mT)
        here = passed[first:end]
        parts.normed_bwd(dnormed, buffers.inputs, w.n1, form, buffers.dh, 1.0, here, None)
        if first == 0:
            begin = tile.step * S
            dx[:, begin : begin + S] = here[0].transpose(0, 1)

        total = sums.of_layers(first, end)
        parts.gelu(buffers.u, buffers.u)
        add_outer(total.qkv, draw, normed)
        add_outer(total.kv, buffers.dpair, pairs_normed)
        add_outer(total.o, buffers.dh_scaled, at.o)
        add_outer(total.up, buffers.du, mlp_normed)
        add_outer(total.down, buffers.dz_scaled, buffers.u)
        if form.norm == "none":
            continue
        parts.add_norm_weight_grad(dnormed, buffers.inputs, form, total.n1)
        if form.persistent_norm:
            parts.add_norm_weight_grad(buffers.dnormed, buffers.z, form, total.n1)
        parts.add_norm_weight_grad(buffers.dhn, buffers.h, form, total.n2)
        parts.add_norm_weight_grad(dq, q_raw, form, total.q_norm)
        parts.add_norm_weight_grad(dkt, k_raw, form, total.k_norm)
        parts.add_norm_weight_grad(buffers.dk, buffers.raw, form, total.k_norm)

    dpast = None
    if past is not None:
        later = Later(*(t[:, :, :T] for t in queries), 0)
        dpast = past_bwd(past, later, slopes, form)
        if dpairs is not None:
            seen = torch.arange(past[0].shape[2], device=x.device) < past[2][:, None]
            for total, given in zip(dpast, dpairs, strict=True):
                total += given[:, :, : total.shape[2]].where(seen[..., None], 0)
    return Gradients(dx[:, :T], sums, dpast)


def take_inputs(x: Tensor, z: Tensor, tile: Tile, tiling: Tiling, out: Tensor) -> None:
    """Write a tile's inputs (m, S, B, C): of x for the first layer, else of the layer below."""
    S, first = tiling.S, tile.first
    if first == 0:
        out[0] = x[:, tile.step * S : (tile.step + 1) * S].transpose(0, 1)
        first = 1
    if first < tile.end:
        out[first - tile.first :] = tiling.view(z, tile._replace(first=first), -1)


class BackwardBuffers(NamedTuple):
    """What the steps of a tile read and write in reverse, (n, S, B, C) with n layers."""

    inputs: Tensor
    attending: Attending
    z: Tensor
    raw: Tensor
    """The persistent keys before their norm."""
    h: Tensor
    """The residual stream between attention and MLP, float32."""
    u: Tensor
    """(n, S, B, F), before the MLP's activation."""
    above: Tensor
    """Float32, the gradient of z that comes from above."""
    dk: Tensor
    """Float32, of the persistent keys; at first what comes from the tokens after the tile."""
    dv: Tensor
    do: Tensor
    """Written, as all that follow: of the attention outputs."""
    delta: Tensor
    """(n, S, B, H) float32: do · o of each head."""
    dpair: Tensor
    """(n, S, B, 2C): of the products with Wk and Wv."""
    dnormed: Tensor
    """Of n1(z)."""
    dz_scaled: Tensor
    """r dz."""
    du: Tensor
    dhn: Tensor
    """Of n2(h)."""
    dh: Tensor
    """Float32."""
    dh_scaled: Tensor
    """r dh."""

    @classmethod
    def of(cls, x: Tensor, weights: Matrices, S: int, form: Form) -> "BackwardBuffers":
        """Make buffers for inputs like x (B, T, C)."""
        (B, _, C), n, F = x.shape, weights.o.shape[0], weights.up.shape[1]
        acc = accumulation_dtype(weights.o.dtype)

        def empty(channels: int = C, dtype: torch.dtype = weights.o.dtype) -> Tensor:
            return x.new_empty(n, S, B, channels, dtype=dtype)

        H = form.num_heads
        return cls(
            inputs=empty(dtype=x.dtype),
            attending=Attending(*(empty() for _ in range(6)), empty(H, acc)),
            z=empty(dtype=x.dtype),
            raw=empty(),
            h=empty(dtype=acc),
            u=empty(F),
            above=empty(dtype=acc),
            dk=empty(dtype=acc),
            dv=empty(dtype=acc),
            do=empty(),
            delta=empty(H, acc),
            dpair=empty(2 * C),
            dnormed=empty(),
            dz_scaled=empty(),
            du=empty(F),
            dhn=empty(),
            dh=empty(dtype=acc),
            dh_scaled=empty(),
        )

    def of_layers(self, first: int, end: int) -> "BackwardBuffers":
        """Return the buffers of layers `first` to `end`."""
        chosen = slice(first, end)
        attending = Attending(*(t[chosen] for t in self.attending))
        rest = self._replace(attending=self.inputs)  # replaced below
        return BackwardBuffers(*(t[chosen] for t in rest))._replace(attending=attending)


def persistent_pairs(
    buffers: BackwardBuffers, w: Matrices, form: Form, parts: ModuleType
) -> Tensor:
    """Write the persistent pairs of a tile's z, and the keys before their norm; return n1(z)."""
    at = buffers.attending
    normed = torch.empty_like(at.q)
    parts.normed(buffers.z, w.n1, form.of_pairs(), normed)
    kv = product(normed, w.kv)
    parts.split_pair(kv, w.k_norm, form, at.k, at.v)
    buffers.raw.copy_(kv[..., : kv.shape[-1] // 2])
    return normed


def run_tile_bwd(
    buffers: BackwardBuffers, w: Matrices, slopes: Tensor, form: Form, parts: ModuleType
) -> None:
    """Run the steps of a tile backwards, one after another."""
    t, r, b = buffers, form.residual_scale, form.block_size
    dz = torch.empty_like(t.h[:, :b])
    for step in reversed(range(t.z.shape[1] // b)):
        rows = slice(step * b, (step + 1) * b)
        parts.pairs_step_bwd(
            t.attending, t.do, t.delta, t.raw, w.k_norm, slopes, form, step, t.dk, t.dv, t.dpair
        )
        dn = product(t.dpair[:, rows], w.kv.mT, t.dnormed[:, rows])
        plain = form.of_pairs()
        parts.normed_bwd(
            dn, t.z[:, rows], w.n1, plain, t.above[:, rows], r, dz, t.dz_scaled[:, rows]
        )
        dg = product(t.dz_scaled[:, rows], w.down.mT)
        parts.gelu_bwd(t.u[:, rows], dg, t.du[:, rows])
        dhn = product(t.du[:, rows], w.up.mT, t.dhn[:, rows])
        parts.normed_bwd(dhn, t.h[:, rows], w.n2, form, dz, r, t.dh[:, rows], t.dh_scaled[:, rows])
        product(t.dh_scaled[:, rows], w.o.mT, t.do[:, rows])
