"""The registered op of the norm with a gate: schema, fake and gradient."""

from typing import Any

import torch
from mezzo_core.ops.gradients import function_of, register_gradient, undispatched
from mezzo_core.ops.replay import replayed
from torch import Tensor


@torch.library.custom_op("mezzo_gsa::gated_norm", mutates_args=())
def gated_norm_op(
    x: Tensor, weight: Tensor, z: Tensor | None, eps: float, dtype: torch.dtype
) -> Tensor:
    """Return y (rows, D) of x (rows, D) and z (tokens, heads, D); see `gated_norm`."""
    from mezzo_gsa.ops.norms import triton

    return triton.run_norm(x, weight, z, eps, dtype)


@gated_norm_op.register_fake
def _(x: Tensor, weight: Tensor, z: Tensor | None, eps: float, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@torch.library.custom_op("mezzo_gsa::gated_norm_bwd", mutates_args=())
def gated_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, parts (programs, D) of the weight's gradient, and dz, which is empty without z."""
    from mezzo_gsa.ops.norms import triton

    return triton.run_norm_bwd(dy, x, weight, z, eps)


@gated_norm_bwd.register_fake
def _(
    dy: Tensor, x: Tensor, weight: Tensor, z: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    from mezzo_gsa.ops.norms import triton

    parts = x.new_empty(triton.count_parts(x), x.shape[1], dtype=torch.float32)
    return x.new_empty(x.shape), parts, x.new_empty(0 if z is None else z.shape)


_call_bwd = undispatched(gated_norm_bwd, replayed(function_of(gated_norm_bwd)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.eps, _ = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, z = ctx.saved_tensors
    dx, parts, dz = _call_bwd(dy, x, weight, z, ctx.eps)
    dweight = parts.sum(0).to(weight.dtype)
    return dx, dweight, None if z is None else dz, None, None


differentiable_gated_norm = register_gradient(
    gated_norm_op, _backward, _save, run=replayed(function_of(gated_norm_op))
)
