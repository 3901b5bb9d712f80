"""The registered decoding steps of gated slot attention, computed by kernels.

They overwrite the given memories and have no gradients.
"""

from typing import Any

import torch
from torch import Tensor

from mezzo_gsa.ops.gsa.form import STEP_FORM_SCHEMA, StepForm
from mezzo_gsa.ops.gsa.projection import split_step
from mezzo_gsa.ops.gsa.state import GSAState

SLOTS = "Tensor(a!) slots_k, Tensor(b!) slots_v"


def _step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    s: Tensor | None,
    slots_k: Tensor,
    slots_v: Tensor,
    scale: float,
    between: Any,
) -> Tensor:
    """Process one token by kernels; return out (B, HQ, V)."""
    from mezzo_gsa.ops.gsa.triton import step

    state = GSAState(slots_k, slots_v)
    return step.run_step(q, k, v, g, s, state, StepForm(scale, between))


def _step_fake(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
    return q.new_empty(*q.shape[:2], v.shape[2])


gsa_step_ = torch.library.custom_op(
    "mezzo_gsa::gsa_step_",
    _step,
    mutates_args=("slots_k", "slots_v"),
    schema="(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor? s, "
    f"{SLOTS}, float scale, str between) -> Tensor",
)
gsa_step_.register_fake(_step_fake)


def _step_projected(
    x: Tensor,
    gate_logits: Tensor | None,
    norm_weight: Tensor | None,
    slots_k: Tensor,
    slots_v: Tensor,
    num_heads: int,
    *form: Any,
) -> Tensor:
    """Process one token by kernels; return the input of the output projection, (B, C)."""
    from mezzo_gsa.ops.gsa.triton import step

    state = GSAState(slots_k, slots_v)
    parts = split_step(x, state, num_heads, gate_logits)
    return step.run_layer_step(parts, norm_weight, state, StepForm(*form))


def _step_projected_fake(
    x: Tensor,
    gate_logits: Tensor | None,
    norm_weight: Tensor | None,
    slots_k: Tensor,
    slots_v: Tensor,
    num_heads: int,
    *form: Any,
) -> Tensor:
    return x.new_empty(x.shape[0], num_heads * slots_v.shape[3], dtype=StepForm(*form).out_dtype)


gsa_step_projected_ = torch.library.custom_op(
    "mezzo_gsa::gsa_step_projected_",
    _step_projected,
    mutates_args=("slots_k", "slots_v"),
    schema="(Tensor x, Tensor? gate_logits, Tensor? norm_weight, "
    f"{SLOTS}, int num_heads, {STEP_FORM_SCHEMA}) -> Tensor",
)
gsa_step_projected_.register_fake(_step_projected_fake)
