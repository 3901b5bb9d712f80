"""The registered ops: RAT attention by Triton kernels, on a projection that holds z, v, g, q, k.

Each takes tensors first, and then the fields of a `Form`.
"""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.gradients import register_gradient, undispatched
from torch import Tensor

from mezzo_rat.ops.rat_attention.arguments import Form
from mezzo_rat.ops.rat_attention.chunks import Plan, continued_plan, packed_plan, plain_plan
from mezzo_rat.ops.rat_attention.state import RATState

FORM = schema_of(Form)


class Saved(NamedTuple):
    """The tensors that the backward needs, in the order of its arguments."""

    x: Tensor
    """(B, T, W): the projection."""
    gate_bias: Tensor | None
    """(H, D)."""
    cu_seqlens: Tensor | None
    """(S + 1,): borders of packed sequences."""
    y: Tensor
    """(B, T, H, D): the output."""
    lse: Tensor
    """(B, H, T) float32: log2 of the sum of the exponentials of each query's logits."""
    k_ends: Tensor
    """(B, N, H, D): k~ at the end of each chunk, rotated."""
    v_ends: Tensor
    """(B, N, H, D): v~ at the end of each chunk."""


@torch.library.custom_op(
    "mezzo_rat::rat_attention",
    mutates_args=(),
    schema=f"(Tensor x, Tensor? gate_bias, Tensor? cu_seqlens, {FORM})"
    " -> (Tensor, Tensor, Tensor, Tensor)",
)
def rat_attention(
    x: Tensor, gate_bias: Tensor | None, cu_seqlens: Tensor | None, *form: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y, lse, k_ends and v_ends, as `Saved` describes them."""
    from mezzo_rat.ops.rat_attention.triton.launches import attend_ends, scan_chunks

    plan = _plan(x, Form(*form), cu_seqlens)
    scanned = scan_chunks(x, gate_bias, plan)
    y, lse = attend_ends(x, scanned, plan)
    return y, lse, scanned.k_ends, scanned.v_ends


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


@torch.library.custom_op(
    "mezzo_rat::rat_attention_bwd",
    mutates_args=(),
    schema=f"(Tensor dy, {schema_of(Saved, Form)}) -> (Tensor, Tensor)",
)
def rat_attention_bwd(
    dy: Tensor,
    x: Tensor,
    gate_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    y: Tensor,
    lse: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    *form: Any,
) -> tuple[Tensor, Tensor]:
    """Return dx (B, T, W) and dbias (H, D), which is an empty tensor if there is no bias."""
    from mezzo_rat.ops.rat_attention.triton.launches import attend_bwd

    saved = Saved(x, gate_bias, cu_seqlens, y, lse, k_ends, v_ends)
    dx, dbias = attend_bwd(dy, saved, _plan(x, Form(*form), cu_seqlens))
    return dx, lse.new_empty(0) if dbias is None else dbias


@rat_attention_bwd.register_fake
def _(
    dy: Tensor,
    x: Tensor,
    gate_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    y: Tensor,
    lse: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    dbias = lse.new_empty(0) if gate_bias is None else gate_bias.new_empty(y.shape[2:])
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
    return dx, None if saved.gate_bias is None else dbias, *none


_call_bwd = undispatched(rat_attention_bwd)
differentiable_rat_attention = register_gradient(rat_attention, _backward, _save, num_results=1)


@torch.library.custom_op(
    "mezzo_rat::rat_attention_continued",
    mutates_args=(),
    schema="(Tensor x, Tensor? gate_bias, Tensor k, Tensor v, Tensor k_ends, Tensor v_ends, "
    f"Tensor lengths, Tensor added, {FORM}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Continue a state by `added` (B,) tokens; return y and the new k, v, k_ends and v_ends.

    The state must have a slot for every chunk that these tokens reach. Not differentiable.
    """
    from mezzo_rat.ops.rat_attention.triton.launches import attend_ends, scan_chunks

    num_slots = k_ends.shape[1]
    plan = continued_plan(x, Form(*form), num_slots, lengths, added)
    scanned = scan_chunks(x, gate_bias, plan, k, v)
    # Chunks that got no token are written to an extra slot at the end, which is then cut off.
    L = plan.form.chunk_size
    slot = (lengths // L)[:, None] + torch.arange(plan.N, device=x.device)
    begin = slot * L - lengths[:, None]
    slot = torch.where(begin < added[:, None], slot, num_slots)
    ends = []
    for old, new in ((k_ends, scanned.k_ends), (v_ends, scanned.v_ends)):
        grown = torch.cat([old, old.new_zeros(old.shape[0], 1, *old.shape[2:])], dim=1)
        grown.scatter_(1, slot[..., None, None].expand_as(new), new)
        ends.append(grown)
    k_grown, v_grown = ends
    y, _ = attend_ends(x, scanned._replace(k_ends=k_grown, v_ends=v_grown), plan)
    assert scanned.k_last is not None
    assert scanned.v_last is not None
    return y, scanned.k_last, scanned.v_last, k_grown[:, :num_slots], v_grown[:, :num_slots]


@rat_attention_continued.register_fake
def _(
    x: Tensor,
    gate_bias: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    y = x.new_empty(x.shape[0], x.shape[1], *k.shape[1:])
    slots = (k_ends.shape[0], k_ends.shape[1] + 1, *k_ends.shape[2:])
    k_new, v_new = (ends.new_empty(slots)[:, :-1] for ends in (k_ends, v_ends))
    return y, torch.empty_like(k), torch.empty_like(v), k_new, v_new


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


def _plan(x: Tensor, form: Form, cu_seqlens: Tensor | None) -> Plan:
    return plain_plan(x, form) if cu_seqlens is None else packed_plan(x, form, cu_seqlens)
