"""The kernels as an op on a projection that holds q, k, v and the gate's logits side by side.

It is read as it is, and gets one gradient, so that nothing is copied apart or together.
"""

from typing import Any

import torch
from torch import Tensor

from mezzo_gsa.ops.gsa.registered import (
    Flat,
    fake_first,
    fake_forward,
    run_backward,
    run_forward,
    unpack,
)


@torch.library.custom_op("mezzo_gsa::gsa_projected", mutates_args=())
def gsa_projected(
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    scale: float,
    between: str,
    damping: float,
    swish: bool,
    keep_states: bool,
    differentiable: bool,
) -> Flat:
    """Run the forward on a projection; see `chunk_gsa_projected`."""
    x = x.contiguous()
    y = _swished(x) if swish else x
    q, k, v, _ = unpack(y, num_heads, num_kv_heads, num_slots)
    g = unpack(x, num_heads, num_kv_heads, num_slots)[3]
    form = (scale, between, damping)
    results = run_forward((q, k, v, g), None, k0, v0, cu_seqlens, form, keep_states, differentiable)
    return (*results[:-1], y) if swish and keep_states and differentiable else results


def _swished(x: Tensor) -> Tensor:
    from mezzo_gsa.ops.gsa.triton import launches

    with torch.cuda.device_of(x):
        return launches.apply_swish(x)


@gsa_projected.register_fake
def _(
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    scale: float,
    between: str,
    damping: float,
    swish: bool,
    keep_states: bool,
    differentiable: bool,
) -> Flat:
    parts = unpack(x, num_heads, num_kv_heads, num_slots)
    results = fake_forward(parts, k0, cu_seqlens, keep_states, differentiable)
    keeps = swish and keep_states and differentiable
    return (*results[:-1], x.new_empty(x.shape)) if keeps else results


@torch.library.custom_op("mezzo_gsa::gsa_projected_bwd", mutates_args=())
def gsa_projected_bwd(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: list[Tensor],
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    scale: float,
    between: str,
    damping: float,
    swish: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the backward on a projection: one gradient, in its shape."""
    x, dx = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    raw, grads = (unpack(y, num_heads, num_kv_heads, num_slots) for y in (x, dx))
    y = x
    if swish:
        y = kept[-1] if kept[-1].numel() else _swished(x)
    q, k, v, _ = unpack(y, num_heads, num_kv_heads, num_slots)
    first = run_backward(
        do, dk_last, dv_last, (q, k, v, raw[3]), raw if swish else None, None, k0, v0, cu_seqlens,
        kept, grads, None, (scale, between, damping),
    )  # fmt: skip
    return (dx, *first)


@gsa_projected_bwd.register_fake
def _(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: list[Tensor],
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    parts = unpack(x, num_heads, num_kv_heads, num_slots)
    return (x.new_empty(x.shape), *fake_first(*parts[1:], cu_seqlens))


def _save_projected(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
    *tensors, ctx.form = *inputs[:4], inputs[4:11]
    ctx.save_for_backward(*tensors, *output[3:])
    ctx.set_materialize_grads(False)


def _projected_backward(
    ctx: Any, do: Tensor | None, dk_last: Tensor | None, dv_last: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    x, k0, v0, cu_seqlens, *kept = ctx.saved_tensors
    dx, dk0, dv0 = gsa_projected_bwd(do, dk_last, dv_last, x, k0, v0, cu_seqlens, kept, *ctx.form)
    first = (None if k0 is None else dk0, None if v0 is None else dv0)
    return (dx, *first, *(None,) * 10)


gsa_projected.register_autograd(_projected_backward, setup_context=_save_projected)
