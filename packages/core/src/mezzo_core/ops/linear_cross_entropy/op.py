"""The chunked form as a registered op, with its fake and its gradient."""

from typing import Any

import torch
from torch import Tensor

from mezzo_core.ops.gradients import register_gradient
from mezzo_core.ops.linear_cross_entropy import chunked
from mezzo_core.ops.precision import accumulation_dtype


@torch.library.custom_op("mezzo::linear_cross_entropy", mutates_args=())
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    link: Tensor,
    ignore_index: int,
    dtype: torch.dtype,
    differentiable: bool,
    use_triton: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return `chunked.Parts`; `link` is an empty tensor that was computed from x."""
    with torch.cuda.device_of(x):
        return chunked.linear_cross_entropy_fwd(
            x, weight, targets, ignore_index, dtype,
            differentiable=differentiable, use_triton=use_triton,
        )  # fmt: skip


@_linear_cross_entropy.register_fake
def _(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _targets, _link, _ignore_index, dtype, differentiable, _use_triton = rest
    sums = accumulation_dtype(dtype)
    return chunked.Parts(
        loss=x.new_empty((), dtype=sums),
        hits=x.new_empty(x.shape[0], dtype=torch.bool),
        dx=x.new_empty(x.shape if differentiable else 0, dtype=dtype),
        dweight=weight.new_empty(weight.shape if differentiable else 0, dtype=sums),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, _targets, link, *_ = inputs
    parts = chunked.Parts(*output)
    ctx.dtypes = x.dtype, weight.dtype
    ctx.mark_non_differentiable(parts.hits, parts.dx, parts.dweight)
    # The backward needs no inputs. They are saved only so that `register_gradient` refuses a second
    # gradient, which would silently be zero. The link stands for x, whose memory nobody else keeps.
    ctx.save_for_backward(parts.dx, parts.dweight, weight, link)


def _backward(ctx: Any, dloss: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
    scaled = (
        (dloss * gradient).to(dtype)
        for gradient, dtype in zip(ctx.saved_tensors[:2], ctx.dtypes, strict=True)
    )
    return (*scaled, *(None,) * 6)


linear_cross_entropy = register_gradient(_linear_cross_entropy, _backward, _save)
