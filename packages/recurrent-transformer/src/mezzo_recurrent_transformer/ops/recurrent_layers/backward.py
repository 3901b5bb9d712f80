"""The tiled backward: the wavefront in reverse, from the inputs and outputs of the layers."""

from types import ModuleType
from typing import NamedTuple

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.eager import Later, past_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import Stored, project, take_inputs
from mezzo_recurrent_transformer.ops.recurrent_layers.parts import Matrices, add_outer, product
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import Tile, Tiling, padded


class Gradients(NamedTuple):
    """What the backward gives."""

    x: Tensor
    """(B, T, C)."""
    weights: Matrices
    """In float32 (float64 for float64)."""
    past: tuple[Tensor, Tensor] | None
    """Of k and v (n, B, P, C)."""


class Persistent(NamedTuple):
    """The persistent pairs of a tile, with what their gradients need."""

    normed: Tensor
    """(m, S, B, C): n1(z), or z itself."""
    raw: Tensor
    """(m, S, B, C): the keys before their norm."""
    k: Tensor
    v: Tensor


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

    stored = Stored.of(*(past or (None, None, None)), tuple(z.shape), weights.o)
    for tile in tiling:
        w = weights.of_layers(tile.first, tile.end)
        pairs = persistent_pairs(tiling.view(z, tile), w, form, parts)
        stored.put(pairs.k, pairs.v, tile, tiling)

    q_all, do_all = (weights.o.new_zeros(n, B, Tp, C) for _ in range(2))
    lse_all, delta_all = (weights.o.new_zeros(n, B, Tp, H, dtype=acc) for _ in range(2))
    dx = weights.o.new_empty(x.shape, dtype=acc)
    passed = weights.o.new_empty(n, S, B, C, dtype=acc)
    """Gradients of the inputs of each layer's last tile: of the outputs of the layer below."""
    sums = Matrices(*(None if w is None else torch.zeros_like(w, dtype=acc) for w in weights))
    for tile in reversed(list(tiling)):
        first, end = tile.first, tile.end
        w, sums_here = weights.of_layers(first, end), sums.of_layers(first, end)
        # The tile's forward once more; all its keys are known, so nothing waits for anything.
        inputs, outputs = take_inputs(x, z, tile, tiling), tiling.view(z, tile).contiguous()
        projected = project(inputs, w, form, parts)
        q, kt, vt = projected[2:]
        pairs = persistent_pairs(outputs, w, form, parts)
        keys = stored.before(tile, S)
        o, lse = parts.attend_tile(q, kt, vt, pairs.k, pairs.v, keys, slopes, form)
        h, hn = parts.add_normed(inputs, product(o, w.o), r, w.n2, form, acc, dtype)
        u = product(hn, w.up)

        # What comes from the layer above, and from later tokens.
        above = torch.empty_like(h)
        above[:-1] = passed[first + 1 : end]
        if end == n:
            begin = (tile.step - n + 1) * S
            above[-1] = dz[:, begin : begin + S].transpose(0, 1)
        else:
            above[-1] = passed[end]
        later = Later(
            *(t[first:end] for t in (q_all, do_all, lse_all, delta_all)),
            (tile.step - first + 1) * S,
        )
        dk, dv = parts.pairs_bwd(pairs.k, pairs.v, later, slopes, form)
        if dpairs is not None:
            for total, given in zip((dk, dv), dpairs, strict=True):
                total += stored.take(given, tile, tiling)
        ran = run_tile_bwd(
            above, dk, dv, q, pairs, o, lse, outputs, h, u, w, slopes, form, parts
        )

        # Queries, temporary pairs and weights need no order.
        dq, dkt, dvt = parts.attend_tile_bwd(
            ran.do, ran.delta, q, kt, vt, pairs.k, pairs.v, lse, keys, slopes, form
        )
        for total, part in zip(
            (q_all, do_all, lse_all, delta_all), (q, ran.do, lse, ran.delta), strict=True
        ):
            tiling.view(total, tile).copy_(part)
        q_raw, k_raw, _ = projected.raw.chunk(3, -1)
        draw = torch.cat(
            [
                parts.normed_bwd(dq, q_raw, w.q_norm, form, None, 1.0, dtype)[1],
                parts.normed_bwd(dkt, k_raw, w.k_norm, form, None, 1.0, dtype)[1],
                dvt.to(dtype),
            ],
            -1,
        )
        dnormed = product(draw, w.qkv.mT)
        dinputs, _ = parts.normed_bwd(dnormed, inputs, w.n1, form, ran.dh, 1.0, dtype)
        passed[first:end] = dinputs
        if first == 0:
            begin = tile.step * S
            dx[:, begin : begin + S] = dinputs[0].transpose(0, 1)
        add_outer(sums_here.qkv, draw, projected.normed)
        add_outer(sums_here.kv, ran.dpair, pairs.normed)
        add_outer(sums_here.o, ran.dh_scaled, o)
        add_outer(sums_here.up, ran.du, hn)
        add_outer(sums_here.down, ran.dz_scaled, parts.gelu(u))
        if form.norm != "none":
            for total, dy, rows in (
                (sums_here.n1, dnormed, inputs),
                (sums_here.n1, ran.dnormed, outputs if form.persistent_norm else None),
                (sums_here.n2, ran.dhn, h),
                (sums_here.q_norm, dq, q_raw),
                (sums_here.k_norm, dkt, k_raw),
                (sums_here.k_norm, ran.dk, pairs.raw),
            ):
                if rows is not None:
                    total += parts.norm_weight_grad(dy, rows, form)

    dpast = None
    if past is not None:
        later = Later(q_all[:, :, :T], do_all[:, :, :T], lse_all[:, :, :T], delta_all[:, :, :T], 0)
        dpast = past_bwd(past, later, slopes, form)
        if dpairs is not None:
            seen = torch.arange(past[0].shape[2], device=x.device) < past[2][:, None]
            for total, given in zip(dpast, dpairs, strict=True):
                total += given[:, :, : total.shape[2]].where(seen[..., None], 0)
    return Gradients(dx[:, :T], sums, dpast)


def persistent_pairs(outputs: Tensor, w: Matrices, form: Form, parts: ModuleType) -> Persistent:
    """Make the persistent pairs of a tile's outputs (m, S, B, C)."""
    if form.persistent_norm:
        normed = parts.normed(outputs, w.n1, form, w.o.dtype)
    else:
        normed = outputs.to(w.o.dtype).contiguous()
    kv = product(normed, w.kv)
    return Persistent(normed, kv[..., : kv.shape[-1] // 2], *parts.split_pair(kv, w.k_norm, form))


class Ran(NamedTuple):
    """What the steps of a tile found, in reverse; all (m, S, B, C), `du` with F channels."""

    do: Tensor
    """Of the attention outputs."""
    delta: Tensor
    """(m, S, B, H) float32: do · o of each head."""
    dk: Tensor
    """Of the normalized persistent keys, float32."""
    dpair: Tensor
    """(m, S, B, 2C): of the products with Wk and Wv."""
    dnormed: Tensor
    """Of n1(z)."""
    dz_scaled: Tensor
    """r dz, rounded."""
    du: Tensor
    dhn: Tensor
    """Of n2(h)."""
    dh: Tensor
    """Float32."""
    dh_scaled: Tensor
    """r dh, rounded."""


def run_tile_bwd(
    above: Tensor,
    dk: Tensor,
    dv: Tensor,
    q: Tensor,
    pairs: Persistent,
    o: Tensor,
    lse: Tensor,
    outputs: Tensor,
    h: Tensor,
    u: Tensor,
    w: Matrices,
    slopes: Tensor,
    form: Form,
    parts: ModuleType,
) -> Ran:
    """Run the steps of a tile backwards, one after another.

    Args:
        above: (m, S, B, C) float32, the gradient of the outputs that comes from above.
        dk: likewise, of the persistent keys, from the tokens after the tile.
        dv: likewise, of the persistent values.
        q: queries.
        pairs: persistent pairs.
        o: attention outputs.
        lse: (m, S, B, H).
        outputs: z.
        h: the residual stream between attention and MLP.
        u: (m, S, B, F), before the MLP's activation.
        w: the weights.
        slopes: (H,) of ALiBi.
        form: the options.
        parts: `eager` or `triton`.
    """
    b, r, dtype = form.block_size, form.residual_scale, q.dtype
    m, S, B, C = q.shape
    ran = Ran(
        do=torch.zeros_like(q),
        delta=torch.zeros_like(lse),
        dk=torch.empty_like(dk),
        dpair=q.new_empty(m, S, B, 2 * C),
        dnormed=torch.empty_like(q),
        dz_scaled=torch.empty_like(q),
        du=torch.empty_like(u),
        dhn=torch.empty_like(q),
        dh=torch.empty_like(above),
        dh_scaled=torch.empty_like(q),
    )
    for step in reversed(range(S // b)):
        rows = slice(step * b, (step + 1) * b)
        dk_here, dv_here = parts.pairs_step_bwd(
            dk, dv, q, pairs.k, pairs.v, ran.do, ran.delta, lse, slopes, form, step
        )
        ran.dk[:, rows] = dk_here
        ran.dpair[:, rows, :, :C] = parts.normed_bwd(
            dk_here, pairs.raw[:, rows], w.k_norm, form, None, 1.0, dtype
        )[1]
        ran.dpair[:, rows, :, C:] = dv_here
        dnormed = product(ran.dpair[:, rows], w.kv.mT)
        plain = form if form.persistent_norm else form._replace(norm="none")
        dz, dz_scaled = parts.normed_bwd(
            dnormed, outputs[:, rows], w.n1, plain, above[:, rows], r, dtype
        )
        du = parts.gelu_bwd(u[:, rows], product(dz_scaled, w.down.mT))
        dhn = product(du, w.up.mT)
        dh, dh_scaled = parts.normed_bwd(dhn, h[:, rows], w.n2, form, dz, r, dtype)
        do = product(dh_scaled, w.o.mT)
        found = (do, parts.head_products(do, o[:, rows], form.num_heads))
        ran.do[:, rows], ran.delta[:, rows] = found
        ran.dnormed[:, rows], ran.dz_scaled[:, rows], ran.du[:, rows] = dnormed, dz_scaled, du
        ran.dhn[:, rows], ran.dh[:, rows], ran.dh_scaled[:, rows] = dhn, dh, dh_scaled
    return ran
