"""Registers the gradient of an op with autograd and with the transforms of torch.func."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_gradient(
    op: Any, backward: Callable[..., Any], save: Callable[..., None]
) -> Callable[..., Any]:
    """Register an op's gradient, and return a function that calls the op with it.

    torch.func does not support gradients from `register_autograd` (torch 2.8 to 2.13). So under its
    transforms the returned function calls the op through an `autograd.Function` with the same
    formula. Neither way supports a second gradient; both raise an error for it.

    Args:
        op: from `torch.library.custom_op`.
        backward: takes ctx and the gradients of the results, and returns a tuple of the gradients
            of the arguments.
        save: takes (ctx, inputs, output) and stores on ctx the values that `backward` needs.
    """
    op.register_autograd(backward, setup_context=save)

    class Gradient(torch.autograd.Function):
        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            # The ops called in `backward` have no gradient themselves, which is an error if
            # gradients are on.
            with torch.no_grad():
                found = backward(ctx, *gradients)
            sources = [x for x in (*gradients, *ctx.saved_tensors) if x is not None]
            return tuple(x if x is None else _Last.apply(x, *sources) for x in found)

    def call(*inputs: Any) -> Any:
        if torch._C._are_functorch_transforms_active():
            return Gradient.apply(*inputs)
        return op(*inputs)

    return call


class _Last(torch.autograd.Function):
    """Passes a gradient on unchanged, and raises an error if it is differentiated again.

    Without this, a second gradient would silently be zero.
    """

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("this op has no second gradient")
