"""The definition of several layers: one after another, each by its own definition."""

import torch
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, LayerWeights
from mezzo_recurrent_transformer.ops.recurrent_layers.reference import recurrent_layer_reference


def recurrent_layers_reference(
    x: Tensor,
    weights: LayerWeights,
    form: Form,
    slopes: Tensor,
    past: tuple[Tensor, Tensor, Tensor] | None,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
    """Run n layers one after another; return z, and with a past its k and v with T slots more."""
    if cu_seqlens is not None:
        sequences = x.split(cu_seqlens.diff().tolist(), 1)
        z = [recurrent_layers_reference(s, weights, form, slopes, None, None)[0] for s in sequences]
        return torch.cat(z, 1), None
    T = x.shape[1]
    grown: list[list[Tensor]] = [[], []]
    for i in range(len(weights.wq)):
        layer = weights.of_layer(i)
        its = None if past is None else (past[0][i], past[1][i], past[2])
        x, *pair = recurrent_layer_reference(x, layer, form, slopes, its)
        if its is not None:
            slot = (its[2][:, None] + torch.arange(T, device=x.device))[..., None, None]
            for all_layers, old, new in zip(grown, its[:2], pair, strict=True):
                room = torch.cat([old.to(new.dtype), torch.zeros_like(new)], 1)
                all_layers.append(room.scatter(1, slot.expand_as(new), new))
    return x, None if past is None else (torch.stack(grown[0]), torch.stack(grown[1]))
