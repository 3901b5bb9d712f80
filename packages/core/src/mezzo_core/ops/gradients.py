"""How an op tells its gradient: to autograd, and to the transforms of torch.func."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register_gradient(
    op: Any, backward: Callable[..., Any], save: Callable[..., None]
) -> Callable[..., Any]:
    """Register an op's gradient, and return what calls the op so that torch.func.grad follows.

    torch.func refuses what `register_autograd` makes (torch 2.8 to 2.13): under its transforms a
    Function of the same formula calls the op. Neither can be differentiated twice; both say so.

    Args:
        op: from `torch.library.custom_op`.
        backward: (ctx, *gradients of the results) to a tuple of the arguments' gradients.
        save: (ctx, inputs, output), keeps what `backward` needs.
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
            # Ops that compute gradients have none, and would be refused with gradients on.
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
    """A gradient as it is, which cannot be differentiated: zeros would be wrong without a word."""

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("this op has no second gradient")
