"""The registered ops: RAT attention by Triton kernels, on a projection that holds z, v, g, q, k.

Each takes tensors first, and then the fields of a `Form`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.gradients import register_gradient, undispatched
from mezzo_core.ops.replay import replayed
from torch import Tensor

from mezzo_rat.ops.rat_attention.arguments import Form, Pulled, Saved, SavedContinued
from mezzo_rat.ops.rat_attention.chunks import (
    Plan,
    bias_parts,
    continued_plan,
    kept_plan,
    packed_plan,
    plain_plan,
)
from mezzo_rat.ops.rat_attention.state import RATState

FORM = schema_of(Form)
PlanMaker = Callable[[Tensor, Form], Plan]
"""Plans rows that are not packed: `plain_plan` in graphs, in eager code `kept_plan`."""


def _attend(
    plain: PlanMaker, x: Tensor, gate_bias: Tensor | None, cu_seqlens: Tensor | None, *form: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, lse, k_ends and v_ends, as `Saved` describes them."""
    from mezzo_rat.ops.rat_attention.triton.launches import attend_ends, scan_chunks

    plan = _plan(x, Form(*form), cu_seqlens, plain)
    with torch.cuda.device_of(x):
        scanned = scan_chunks(x, gate_bias, plan)
        y, lse = attend_ends(x, scanned, plan)
    return y, lse, scanned.k_ends, scanned.v_ends


rat_attention = torch.library.custom_op(
    "mezzo_rat::rat_attention",
    partial(_attend, plain_plan),
    mutates_args=(),
    schema=f"(Tensor x, Tensor? gate_bias, Tensor? cu_seqlens, {FORM})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)


@rat_attention.register_fake
def _(
    x: Tensor, gate_bias: Tensor | None, cu_seqlens: Tensor | None, *form: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    asked = Form(*form)
    (B, T, W), H, L = x.shape, asked.num_heads, asked.chunk_size
    D = asked.head_dim(W)
    N = (T + L - 1) // L if cu_seqlens is None else T // L + cu_seqlens.shape[0] - 1
    ends = x.new_empty(B, N, H, D)
    lse = x.new_empty(B, H, T, dtype=torch.float32)
    return x.new_empty(B, T, H, D), lse, ends, torch.empty_like(ends)


def _gradients(plain: PlanMaker, dy: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Return dx (B, T, W) and parts of dbias (·, H, D), an empty tensor if there is no bias."""
    from mezzo_rat.ops.rat_attention.triton.launches import ends_bwd, scan_bwd

    n = len(Saved._fields)
    saved = Saved(*rest[:n])
    plan = _plan(saved.x, Form(*rest[n:]), saved.cu_seqlens, plain)
    with torch.cuda.device_of(dy):
        dx, dbias = scan_bwd(saved, ends_bwd(dy, saved, plan), plan)
    return dx, saved.lse.new_empty(0) if dbias is None else dbias


rat_attention_bwd = torch.library.custom_op(
    "mezzo_rat::rat_attention_bwd",
    partial(_gradients, plain_plan),
    mutates_args=(),
    schema=f"(Tensor dy, {schema_of(Saved, Form)}) -> (Tensor, Tensor)",
)


@rat_attention_bwd.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gate_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    y: Tensor,
    lse: Tensor,
    k_ends: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    parts = bias_parts(x.shape[0] * k_ends.shape[1])
    dbias = lse.new_empty(0) if gate_bias is None else lse.new_empty(parts, *y.shape[2:])
    return x.new_empty(x.shape), dbias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gate_bias, cu_seqlens, *ctx.form = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*Saved(x, gate_bias, cu_seqlens, *output))


def _backward(ctx: Any, dy: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    # Callers use y only, so the other results never have a gradient.
    none = (None,) * (1 + len(ctx.form))
    if dy is None:
        return None, None, *none
    saved = Saved(*ctx.saved_tensors)
    dx, dbias = _call_bwd(dy, *saved, *ctx.form)
    bias = saved.gate_bias
    return dx, None if bias is None else dbias.sum(0).to(bias.dtype), *none


_call_bwd = undispatched(rat_attention_bwd, replayed(partial(_gradients, kept_plan)))
differentiable_rat_attention = register_gradient(
    rat_attention, _backward, _save, run=replayed(partial(_attend, kept_plan)), num_results=1
)


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
        y, the new k, v, k_ends and v_ends, and lse. The ends have one unused slot more, so that the
        backward takes them without a copy.
    """
    from mezzo_rat.ops.rat_attention.triton.launches import attend_continued

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
    schema=f"({schema_of(Pulled, SavedContinued, Form)})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def rat_attention_continued_bwd(*arguments: Any) -> tuple[Tensor, ...]:
    """Return the gradients of x, the bias (empty if there is none), k, v, k_ends and v_ends."""
    from mezzo_rat.ops.rat_attention.triton.launches import attend_continued_bwd

    pulled, saved, form = _read_continued(arguments)
    num_slots = saved.k_ends.shape[1] - 1
    plan = continued_plan(saved.x, form, num_slots, saved.lengths, saved.added)
    with torch.cuda.device_of(pulled.dy):
        dx, dbias, *state = attend_continued_bwd(pulled, saved, plan)
    return dx, saved.lse.new_empty(0) if dbias is None else dbias, *state


def _read_continued(arguments: tuple[Any, ...]) -> tuple[Pulled, SavedContinued, Form]:
    n = len(Pulled._fields)
    m = n + len(SavedContinued._fields)
    return Pulled(*arguments[:n]), SavedContinued(*arguments[n:m]), Form(*arguments[m:])


@rat_attention_continued_bwd.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    pulled, saved, _ = _read_continued(arguments)
    bias, ends = saved.gate_bias, saved.k_ends
    dbias = saved.lse.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    old = (ends.new_empty(ends.shape[0], ends.shape[1] - 1, *ends.shape[2:]) for _ in range(2))
    dx = saved.x.new_empty(saved.x.shape)
    new = (d.new_empty(d.shape) for d in (pulled.dk, pulled.dv))
    return dx, dbias, *new, *old


def _save_continued(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gate_bias, k, v, _, _, lengths, added, *ctx.form = inputs
    y, _, _, k_ends, v_ends, lse = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(
        *SavedContinued(x, gate_bias, k, v, lengths, added, y, lse, k_ends, v_ends)
    )


def _backward_continued(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    dy, dk, dv, dk_ends, dv_ends = grads[: len(Pulled._fields)]  # nobody uses lse
    saved = SavedContinued(*ctx.saved_tensors)
    dy, dk, dv = (
        torch.zeros_like(of) if d is None else d.contiguous()
        for d, of in ((dy, saved.y), (dk, saved.k), (dv, saved.v))
    )
    pulled = Pulled(dy, dk, dv, dk_ends, dv_ends)
    dx, dbias, *state = _call_continued_bwd(*pulled, *saved, *ctx.form)
    none = (None,) * (2 + len(ctx.form))
    return dx, None if saved.gate_bias is None else dbias, *state, *none


_call_continued_bwd = undispatched(rat_attention_continued_bwd)
differentiable_continued = register_gradient(
    rat_attention_continued, _backward_continued, _save_continued, num_results=5
)


@torch.library.custom_op(
    "mezzo_rat::rat_attention_step_",
    mutates_args=RATState._fields,
    schema="(Tensor x, Tensor? gate_bias, Tensor(a!) k, Tensor(b!) v, Tensor(c!) k_ends, "
    f"Tensor(d!) v_ends, Tensor(e!) lengths, {FORM}) -> Tensor",
)
def rat_attention_step_(
    x: Tensor,
    gate_bias: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    lengths: Tensor,
    *form: Any,
) -> Tensor:
    """Decode one token of every row and update the state; return y (B, 1, H, D), no gradients."""
    from mezzo_rat.ops.rat_attention.triton.step import step

    return step(x, gate_bias, RATState(k, v, k_ends, v_ends, lengths), Form(*form))


@rat_attention_step_.register_fake
def _(x: Tensor, gate_bias: Tensor | None, k: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], 1, *k.shape[1:])


def _plan(x: Tensor, form: Form, cu_seqlens: Tensor | None, plain: PlanMaker) -> Plan:
    return plain(x, form) if cu_seqlens is None else packed_plan(x, form, cu_seqlens)
