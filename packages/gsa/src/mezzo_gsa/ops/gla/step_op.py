"""The registered decoding steps of gated linear attention, computed by kernels.

They overwrite the given state and have no gradients.
"""

from typing import Any

import torch
from torch import Tensor

from mezzo_gsa.ops.gla.form import LAYER_FORM_SCHEMA, LayerForm


@torch.library.custom_op("mezzo_gsa::gla_step_", mutates_args=("state",))
def gla_step_(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, scale: float) -> Tensor:
    """Process one token by a kernel; return out (B, HQ, V)."""
    from mezzo_gsa.ops.gla.triton import step

    return step.run_step(q, k, v, g, state, LayerForm(scale))


@gla_step_.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: object) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


def _step_layer(
    q: Tensor,
    k: Tensor | None,
    v: Tensor,
    gates: Tensor,
    state: Tensor,
    norm_weight: Tensor,
    z: Tensor | None,
    places: Tensor | None,
    *form: Any,
) -> Tensor:
    """Process one token by kernels; return the input of the output projection, (B, C)."""
    from mezzo_gsa.ops.gla.triton import step

    return step.run_layer_step(q, k, v, gates, state, norm_weight, z, places, LayerForm(*form))


def _step_layer_fake(q: Tensor, k: Tensor | None, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * v.shape[2])


gla_step_layer_ = torch.library.custom_op(
    "mezzo_gsa::gla_step_layer_",
    _step_layer,
    mutates_args=("state",),
    schema="(Tensor q, Tensor? k, Tensor v, Tensor gates, Tensor(a!) state, Tensor norm_weight, "
    f"Tensor? z, Tensor? places, {LAYER_FORM_SCHEMA}) -> Tensor",
)
gla_step_layer_.register_fake(_step_layer_fake)
