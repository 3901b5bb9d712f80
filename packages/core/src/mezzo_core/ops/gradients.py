"""Registers the gradient of an op with autograd and with the transforms of torch.func."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mezzo_core.ops.checks import in_transform
from mezzo_core.ops.watched import thread


def register_gradient(
    op: Any,
    backward: Callable[..., Any],
    save: Callable[..., None],
    *,
    run: Callable[..., Any] | None = None,
    num_results: int | None = None,
) -> Callable[..., Any]:
    """Register an op's gradient, and return a function that calls the op with it.

    The returned function takes one of three ways, all with the same formula:

    - Under transforms of torch.func, an `autograd.Function` calls the op, since torch.func does not
      support gradients from `register_autograd` (torch 2.8 to 2.13).
    - On plain tensors in eager code, another `autograd.Function` calls the op's Python function.
      This saves the host PyTorch's dispatch of a custom op and of its gradient. If no gradient is
      wanted, the Python function is called alone.
    - In all other cases the op itself is called: under torch.compile or dispatch modes, and for
      tensors of other kinds or without data.

    None supports a second gradient; all raise an error for it.

    Args:
        op: from `torch.library.custom_op`.
        backward: takes ctx and the gradients of the results, and returns a tuple of the gradients
            of the arguments.
        save: takes (ctx, inputs, output) and stores on ctx the values that `backward` needs.
        run: the Python function for eager code, by default the op's own. It may return None where
            an op has to return an empty tensor. For an op that only launches kernels, give
            `replayed(function_of(op))`.
        num_results: how many of the op's results are returned, by default all. The others are for
            `save` only; in eager code autograd does not see them, which saves the host time.
    """

    class Gradient(torch.autograd.Function):
        generate_vmap_rule = True  # torch then runs the op row by row

        @staticmethod
        def forward(*inputs: Any) -> Any:
            return op(*inputs)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, output)

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
            if not torch.is_grad_enabled():
                return backward(ctx, *gradients)
            # The ops called in `backward` have no gradient: with gradients on, they would raise.
            with torch.no_grad():
                found = backward(ctx, *gradients)
            sources = [x for x in (*gradients, *ctx.saved_tensors) if x is not None]
            return tuple(x if x is None else _Last.apply(x, *sources) for x in found)

    op.register_autograd(Gradient.backward, setup_context=save)
    run_eager = run or function_of(op)

    def results(output: Any) -> Any:
        return output if num_results is None else output[:num_results]

    class EagerGradient(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = run_eager(*inputs)
            save(ctx, inputs, output)
            return results(output)

        backward = Gradient.backward

    def call(*inputs: Any) -> Any:
        if in_transform():
            return results(Gradient.apply(*inputs))
        if not _is_eager(inputs):
            return results(op(*inputs))
        if _wants_gradient(inputs):
            return EagerGradient.apply(*map(_saveable, inputs))
        with torch.no_grad():
            return results(run_eager(*inputs))

    return call


def function_of(op: Any) -> Callable[..., Any]:
    """Return the Python function of an op from `torch.library.custom_op`."""
    return op._init_fn  # torch has no public name for it


def undispatched(op: Any, run: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that calls an op without a gradient, for use in a backward.

    On plain tensors in eager code it calls the Python function (`run`, or else the op's own), which
    saves the host PyTorch's dispatch; otherwise it calls the op.
    """
    run_eager = run or function_of(op)

    def call(*inputs: Any) -> Any:
        return run_eager(*inputs) if not in_transform() and _is_eager(inputs) else op(*inputs)

    return call


def saveable(x: Any) -> Any:
    """Return x, or a copy of it if it was made in inference mode: autograd would not save it."""
    return x if torch.compiler.is_compiling() or not torch.is_grad_enabled() else _saveable(x)


def _saveable(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) and x.is_inference() else x


def refuse_second_gradient(result: Tensor) -> Tensor:
    """Return the result of torch's attention, made to raise our error for a second gradient.

    torch's own error names a fused kernel that no caller has heard of.
    """
    node = None if torch.compiler.is_compiling() else result.grad_fn
    if node is not None and node.name().startswith(("ScaledDotProduct", "CompiledFunction")):
        node.register_hook(_mark_last)
    return result


def _mark_last(gradients: tuple[Tensor | None, ...], _: Any) -> tuple[Tensor | None, ...] | None:
    if not torch.is_grad_enabled():
        return None
    return tuple(x if x is None else _Last.apply(x) for x in gradients)


def _is_eager(inputs: tuple[Any, ...]) -> bool:
    """Tell whether this is eager code on plain tensors, and nothing traces or watches ops."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._len_torch_dispatch_stack() > (thread.recorder is not None):
        return False
    for x in inputs:
        if x is None:
            continue
        if type(x) in _PLAIN:
            # In a pullback of torch.func some tensors are still wrapped, without data.
            if x.is_meta or torch._C._functorch.is_functorch_wrapped_tensor(x):
                return False
        elif isinstance(x, Tensor) or (type(x) is list and not _is_eager(tuple(x))):
            return False
    return True


_PLAIN = (Tensor, torch.nn.Parameter)


def _wants_gradient(inputs: tuple[Any, ...]) -> bool:
    """Tell whether autograd must see a call. It must in forward mode too, to raise its error."""
    if forward_ad._current_level >= 0:
        return True
    return torch.is_grad_enabled() and any(
        isinstance(x, Tensor) and x.requires_grad for x in inputs
    )


class _Last(torch.autograd.Function):
    """Passes a gradient on unchanged, and raises an error if it is differentiated again.

    Without this, a second gradient would silently be zero.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(gradient: Tensor, *sources: Tensor) -> Tensor:
        return gradient.view_as(gradient)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise RuntimeError("this op has no second gradient")
