"""RAT attention by Triton kernels, as registered ops on a projection that holds z, v, g, q, k.

`rope` is "chunk", "token" or "none", since an op's schema has no optional literals.
"""

from typing import Any, Literal, cast

import torch
from mezzo_core.ops.gradients import register_gradient
from torch import Tensor

from mezzo_rat.ops.rat_attention.plan import Plan, Sizes, continued_plan, packed_plan, plain_plan
from mezzo_rat.ops.rat_attention.reference import RATForm
from mezzo_rat.ops.rat_attention.state import RATState


def sizes_of(x: Tensor, num_heads: int, num_groups: int, has_z: bool) -> Sizes:
    """Return what a projection (B, T, W) holds."""
    heads = (2 + has_z) * num_heads + 2 * num_groups
    return Sizes(x.shape[0], x.shape[1], num_heads, num_groups, x.shape[2] // heads, has_z)


@torch.library.custom_op("mezzo_rat::rat_attention", mutates_args=())
def rat_attention(
    x: Tensor,
    gate_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    num_heads: int,
    num_groups: int,
    has_z: bool,
    chunk_size: int,
    rope: str,
    rope_base: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return y (B, T, H, D), lse (B, H, T), and the ends (B, N, H, D) of k~, rotated, and of v~."""
    from mezzo_rat.ops.rat_attention import triton

    sizes = sizes_of(x, num_heads, num_groups, has_z)
    form = _form(chunk_size, rope, rope_base, scale)
    plan = _plan(sizes, form, cu_seqlens, x.device)
    v_run, k_ends, v_ends, own, _, _ = triton.scan_chunks(x, gate_bias, sizes, form, plan)
    y, lse = triton.attend_ends(x, v_run, k_ends, v_ends, own, sizes, form, plan)
    return y, lse, k_ends, v_ends


@rat_attention.register_fake
def _(
    x: Tensor,
    gate_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    num_heads: int,
    num_groups: int,
    has_z: bool,
    chunk_size: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, T, H, _, D, _ = sizes_of(x, num_heads, num_groups, has_z)
    if cu_seqlens is None:
        N = (T + chunk_size - 1) // chunk_size
    else:
        N = T // chunk_size + cu_seqlens.shape[0] - 1
    ends = x.new_empty(B, N, H, D)
    lse = x.new_empty(B, H, T, dtype=torch.float32)
    return x.new_empty(B, T, H, D), lse, ends, torch.empty_like(ends)


@torch.library.custom_op("mezzo_rat::rat_attention_bwd", mutates_args=())
def _rat_attention_bwd(
    dy: Tensor,
    x: Tensor,
    gate_bias: Tensor | None,
    cu_seqlens: Tensor | None,
    y: Tensor,
    lse: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    num_groups: int,
    has_z: bool,
    chunk_size: int,
    rope: str,
    rope_base: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return dx (B, T, W) and dbias (H, D); without a bias, an empty tensor."""
    from mezzo_rat.ops.rat_attention import triton

    sizes = sizes_of(x, y.shape[2], num_groups, has_z)
    form = _form(chunk_size, rope, rope_base, scale)
    plan = _plan(sizes, form, cu_seqlens, x.device)
    dx, dbias = triton.attend_bwd(
        dy, x, gate_bias, y, lse, k_ends, v_ends, sizes, form, plan
    )  # fmt: skip
    return dx, lse.new_empty(0) if dbias is None else dbias


@_rat_attention_bwd.register_fake
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
    x, gate_bias, cu_seqlens, _, *ctx.rest = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gate_bias, cu_seqlens, *output)


def _backward(ctx: Any, dy: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    # Only y is shown outside, so nothing else has a gradient.
    none = (None,) * 8
    if dy is None:
        return None, None, *none
    x, gate_bias, cu_seqlens, *kept = ctx.saved_tensors
    dx, dbias = _rat_attention_bwd(dy, x, gate_bias, cu_seqlens, *kept, *ctx.rest)
    return dx, None if gate_bias is None else dbias, *none


differentiable_rat_attention = register_gradient(rat_attention, _backward, _save)


@torch.library.custom_op("mezzo_rat::rat_attention_continued", mutates_args=())
def rat_attention_continued(
    x: Tensor,
    gate_bias: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    seen: Tensor,
    added: Tensor,
    num_groups: int,
    has_z: bool,
    chunk_size: int,
    rope: str,
    rope_base: float,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Continue a state that has slots enough; return y, and k, v, k_ends, v_ends afterwards.

    Not differentiable.
    """
    from mezzo_rat.ops.rat_attention import triton

    sizes = sizes_of(x, k.shape[1], num_groups, has_z)
    form = _form(chunk_size, rope, rope_base, scale)
    num_slots = k_ends.shape[1]
    plan = continued_plan(sizes, form, num_slots, seen, added)
    v_run, k_new, v_new, own, k_last, v_last = triton.scan_chunks(
        x, gate_bias, sizes, form, plan, k, v
    )
    # Chunks that got no token go to a slot of their own at the end, which is then cut off.
    slot = (seen // chunk_size)[:, None] + torch.arange(plan.N, device=x.device)
    begin = slot * chunk_size - seen[:, None]
    slot = torch.where(begin < added[:, None], slot, num_slots)
    ends = []
    for old, new in ((k_ends, k_new), (v_ends, v_new)):
        grown = torch.cat([old, old.new_zeros(old.shape[0], 1, *old.shape[2:])], dim=1)
        grown.scatter_(1, slot[..., None, None].expand_as(new), new)
        ends.append(grown)
    y, _ = triton.attend_ends(x, v_run, ends[0], ends[1], own, sizes, form, plan)
    assert k_last is not None
    assert v_last is not None
    return y, k_last, v_last, ends[0][:, :num_slots], ends[1][:, :num_slots]


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
    "mezzo_rat::rat_attention_step_", mutates_args=("k", "v", "k_ends", "v_ends", "lengths")
)
def rat_attention_step_(
    x: Tensor,
    gate_bias: Tensor | None,
    k: Tensor,
    v: Tensor,
    k_ends: Tensor,
    v_ends: Tensor,
    lengths: Tensor,
    num_groups: int,
    has_z: bool,
    chunk_size: int,
    rope: str,
    rope_base: float,
    scale: float,
) -> Tensor:
    """Decode one token of every row into the state; return y (B, 1, H, D). Not differentiable."""
    from mezzo_rat.ops.rat_attention import triton_step

    sizes = sizes_of(x, k.shape[1], num_groups, has_z)
    state = RATState(k, v, k_ends, v_ends, lengths)
    return triton_step.step(x, gate_bias, state, sizes, _form(chunk_size, rope, rope_base, scale))


@rat_attention_step_.register_fake
def _(x: Tensor, gate_bias: Tensor | None, k: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape[0], 1, *k.shape[1:])


def _form(chunk_size: int, rope: str, rope_base: float, scale: float) -> RATForm:
    kind = None if rope == "none" else cast(Literal["chunk", "token"], rope)
    return RATForm(chunk_size, kind, rope_base, scale)


def _plan(sizes: Sizes, form: RATForm, cu_seqlens: Tensor | None, device: torch.device) -> Plan:
    if cu_seqlens is None:
        return plain_plan(sizes, form, device)
    return packed_plan(sizes, form, cu_seqlens)
