"""The registered op that continues a state by Triton kernels, with its gradient.

Its arguments are tensors first, as in `op.py`, and then the fields of a `Form`.
"""

from typing import Any

import torch
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.gradients import register_gradient, undispatched
from torch import Tensor

from mezzo_rat.ops.rat_attention.arguments import Form
from mezzo_rat.ops.rat_attention.chunks import continued_plan
from mezzo_rat.ops.rat_attention.saved import SavedContinued
from mezzo_rat.ops.rat_attention.state import RATState

FORM = schema_of(Form)


@torch.library.custom_op(
    "mezzo_rat::rat_attention_continued",
    mutates_args=(),
    schema="(Tensor x, Tensor? gate_bias, Tensor k, Tensor v, Tensor k_ends, Tensor v_ends, "
    f"Tensor lengths, Tensor added, {FORM}) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def rat_attention_continued(
    x: Tensor,
    gate_bias: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    lengths: Tensor,
    added: Tensor,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Continue a state by `added` (B,) tokens.

    The state must have a slot for every chunk that these tokens reach. Where a gradient is wanted,
    x must be finite in the padding too.

    Returns:
        y, the new k, v, k_ends and v_ends, and lse. The ends have one slot more, which holds
        nothing: so the backward finds them in one piece of memory.
    """
    from mezzo_rat.ops.rat_attention.triton.continued import attend_continued

    plan = continued_plan(x, Form(*form), k_ends.shape[1], lengths, added)
    with torch.cuda.device_of(x):
        return attend_continued(x, gate_bias, RATState(k, v, k_ends, v_ends, lengths), plan)


@rat_attention_continued.register_fake
def _(
    x: Tensor,
    gate_bias: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (B, T, _), (_, H, D) = x.shape, k.shape
    ends = (B, k_ends.shape[1] + 1, H, D)
    return (
        x.new_empty(B, T, H, D),
        torch.empty_like(k),
        torch.empty_like(v),
        k_ends.new_empty(ends),
        v_ends.new_empty(ends),
        x.new_empty(B, H, T, dtype=torch.float32),
    )


@torch.library.custom_op(
    "mezzo_rat::rat_attention_continued_bwd",
    mutates_args=(),
    schema="(Tensor dy, Tensor dk, Tensor dv, Tensor? dk_ends, Tensor? dv_ends, "
    f"{schema_of(SavedContinued, Form)}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def rat_attention_continued_bwd(
    dy: Tensor,
    dk: Tensor,
    dv: Tensor,
    dk_ends: Tensor | None,
    dv_ends: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of x, the bias (empty if there is none), k, v, k_ends and v_ends."""
    from mezzo_rat.ops.rat_attention.triton.continued import attend_continued_bwd

    n = len(SavedContinued._fields)
    saved, form = SavedContinued(*rest[:n]), Form(*rest[n:])
    num_slots = saved.k_ends.shape[1] - 1
    plan = continued_plan(saved.x, form, num_slots, saved.lengths, saved.added)
    with torch.cuda.device_of(dy):
        dx, dbias, *state = attend_continued_bwd(dy, dk, dv, dk_ends, dv_ends, saved, plan)
    return dx, saved.lse.new_empty(0) if dbias is None else dbias, *state


@rat_attention_continued_bwd.register_fake
def _(
    dy: Tensor,
    dk: Tensor,
    dv: Tensor,
    dk_ends: Tensor | None,
    dv_ends: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    saved = SavedContinued(*rest[: len(SavedContinued._fields)])
    bias, ends = saved.gate_bias, saved.k_ends
    dbias = saved.lse.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    old = (ends.new_empty(ends.shape[0], ends.shape[1] - 1, *ends.shape[2:]) for _ in range(2))
    dx = saved.x.new_empty(saved.x.shape)
    return dx, dbias, dk.new_empty(dk.shape), dv.new_empty(dv.shape), *old


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gate_bias, k, v, _, _, lengths, added, *ctx.form = inputs
    y, _, _, k_ends, v_ends, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *SavedContinued(x, gate_bias, k, v, lengths, added, y, lse, k_ends, v_ends)
    )


def _backward(
    ctx: Any,
    dy: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dk_ends: Tensor | None,
    dv_ends: Tensor | None,
    *unused: Tensor | None,
) -> tuple[Tensor | None, ...]:
    saved = SavedContinued(*ctx.saved_tensors)
    dy, dk, dv = (
        torch.zeros_like(of) if d is None else d.contiguous()
        for d, of in ((dy, saved.y), (dk, saved.k), (dv, saved.v))
    )
    dx, dbias, *state = _call_bwd(dy, dk, dv, dk_ends, dv_ends, *saved, *ctx.form)
    none = (None,) * (2 + len(ctx.form))
    return dx, None if saved.gate_bias is None else dbias, *state, *none


_call_bwd = undispatched(rat_attention_continued_bwd)
differentiable_continued = register_gradient(
    rat_attention_continued, _backward, _save, num_results=5
)
