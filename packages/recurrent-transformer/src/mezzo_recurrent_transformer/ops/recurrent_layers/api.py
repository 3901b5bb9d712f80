"""The public op `recurrent_layers`: checks its arguments and chooses an implementation."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, LayerWeights, Norm
from mezzo_recurrent_transformer.ops.recurrent_layers.reference import recurrent_layer_reference


class Past(NamedTuple):
    """The persistent pairs of the tokens so far: what later tokens attend to."""

    k: Float[Tensor, "n B S H D"]
    """Keys. Token p of a row is in slot p; slots beyond a row's newest token hold anything."""
    v: Float[Tensor, "n B S H D"]
    lengths: Int[Tensor, " B"]
    """int64, the number of tokens that each row has had."""


class RecurrentOutput(NamedTuple):
    """What `recurrent_layers` returns."""

    z: Float[Tensor, "B T C"]
    """The output of the last layer."""
    past: Past | None
    """With a slot more for each token of x; None if no past was given."""


def recurrent_layers(
    x: Float[Tensor, "B T C"],
    weights: LayerWeights,
    *,
    num_heads: int,
    residual_scale: float = 1.0,
    norm: Norm = "rms",
    eps: float = 1e-5,
    persistent_norm: bool = True,
    block_size: int = 1,
    alibi_slopes: Float[Tensor, " H"] | None = None,
    past: Past | None = None,
    cu_seqlens: Int[Tensor, " borders"] | None = None,
    lengths: Int[Tensor, " B"] | None = None,
    impl: str = "auto",
) -> RecurrentOutput:
    form = Form(num_heads, residual_scale, norm, eps, persistent_norm, block_size)
    slopes = x.new_zeros(num_heads) if alibi_slopes is None else alibi_slopes
    if cu_seqlens is not None:
        borders = cu_seqlens.tolist()
        parts = [
            recurrent_layers(
                x[:, a:b], weights, num_heads=num_heads, residual_scale=residual_scale, norm=norm,
                eps=eps, persistent_norm=persistent_norm, block_size=block_size,
                alibi_slopes=alibi_slopes, impl=impl,
            ).z
            for a, b in zip(borders, borders[1:])
        ]
        return RecurrentOutput(torch.cat(parts, 1), None)
    T = x.shape[1]
    if lengths is not None:
        x = x.masked_fill((torch.arange(T, device=x.device) >= lengths[:, None])[..., None], 0)
    n = weights.wq.shape[0]
    ks, vs = [], []
    for i in range(n):
        one = LayerWeights(*(None if w is None else w[i] for w in weights))
        p = None if past is None else (past.k[i], past.v[i], past.lengths)
        x, k, v = recurrent_layer_reference(x, one, form, slopes, p)
        if past is not None:
            slot = (past.lengths[:, None] + torch.arange(T, device=x.device))[..., None, None].expand_as(k)
            ks.append(torch.cat([past.k[i], torch.zeros_like(k)], 1).scatter(1, slot, k))
            vs.append(torch.cat([past.v[i], torch.zeros_like(v)], 1).scatter(1, slot, v))
    if past is None:
        return RecurrentOutput(x, None)
    new = Past(torch.stack(ks), torch.stack(vs), past.lengths + (T if lengths is None else lengths))
    return RecurrentOutput(x, new)
