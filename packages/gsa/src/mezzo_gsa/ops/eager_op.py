"""Loops of eager PyTorch as one op of a compiled graph.

torch.compile would unroll them, and take minutes for what runs in milliseconds. Called without it
they stay eager code, which autograd follows as it is.
"""

from collections.abc import Callable
from typing import Any

import torch
from mezzo_core.ops.packed import check_borders
from torch import Tensor

from mezzo_gsa.ops.autocast import without_autocast

Form = Callable[[list[Tensor], list[Tensor], Tensor | None, float, str], list[Tensor]]
"""Takes [q, k, v, ...] of at least one token, the states before the first, the borders of packed
sequences, what multiplies q, and what stands between two passes. Returns out (B, T, HQ, V) and the
last states."""

ARGUMENTS = "Tensor[] inputs, Tensor[] states, Tensor? cu_seqlens, float scale, str between"


def eager_op(name: str, form: Form) -> Form:
    """Return `form` without autocast, with borders checked; one op where torch.compile traces.

    The op's backward runs the form once more, and goes back through that.
    """

    def run(
        inputs: list[Tensor],
        states: list[Tensor],
        cu_seqlens: Tensor | None,
        scale: float,
        between: str,
    ) -> list[Tensor]:
        if cu_seqlens is not None:
            check_borders(name, cu_seqlens, inputs[0].shape[1])
        if not inputs[0].shape[1]:
            q, _, v, *_ = inputs
            none = q.new_zeros(*q.shape[:3], v.shape[3])
            return [none + sum(x.sum() for x in inputs), *states]  # for gradients, as empty
        # Autocast would take the products of float32 states in 16 bits.
        with without_autocast(inputs[0].device):
            return form(inputs, states, cu_seqlens, scale, between)

    def forward(*arguments: Any) -> list[Tensor]:
        return [_fresh(x) for x in run(*arguments)]

    def fake(inputs: list[Tensor], states: list[Tensor], *_: Any) -> list[Tensor]:
        q, _, v, *_ = inputs
        return [q.new_empty(*q.shape[:3], v.shape[3]), *(x.new_empty(x.shape) for x in states)]

    def backward(
        dresults: list[Tensor | None], inputs: list[Tensor], states: list[Tensor], *rest: Any
    ) -> list[Tensor]:
        # An op runs below autograd; this one needs it.
        key = torch._C.DispatchKey.AutogradFunctionality
        with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
            leaves = [x.detach().requires_grad_() for x in (*inputs, *states)]
            results = run(leaves[: len(inputs)], leaves[len(inputs) :], *rest)
            pairs = [
                (y, dy)
                for y, dy in zip(results, dresults, strict=True)
                if dy is not None and y.requires_grad
            ]
            if not pairs:
                return [torch.zeros_like(x) for x in leaves]
            ys, dys = zip(*pairs, strict=True)
            found = torch.autograd.grad(ys, leaves, dys, materialize_grads=True)
        return [_fresh(x) for x in found]

    def fake_backward(
        dresults: list[Tensor | None], inputs: list[Tensor], states: list[Tensor], *_: Any
    ) -> list[Tensor]:
        return [x.new_empty(x.shape) for x in (*inputs, *states)]

    def save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
        parts, states, cu_seqlens, *ctx.form = inputs
        ctx.num_inputs = len(parts)
        ctx.save_for_backward(*parts, *states, cu_seqlens)
        # Few pull on the last states: a missing gradient stays missing.
        ctx.set_materialize_grads(False)

    def pull(ctx: Any, dresults: list[Tensor | None]) -> tuple[Any, ...]:
        *tensors, cu_seqlens = ctx.saved_tensors
        n = ctx.num_inputs
        found = op_bwd(dresults, tensors[:n], tensors[n:], cu_seqlens, *ctx.form)
        return found[:n], found[n:], None, None, None

    op = torch.library.custom_op(
        f"mezzo_gsa::{name}_eager", forward, mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor[]"
    )
    op_bwd = torch.library.custom_op(
        f"mezzo_gsa::{name}_eager_bwd",
        backward,
        mutates_args=(),
        schema=f"(Tensor?[] dresults, {ARGUMENTS}) -> Tensor[]",
    )
    op.register_fake(fake)
    op_bwd.register_fake(fake_backward)
    op.register_autograd(pull, setup_context=save)

    def dispatch(
        inputs: list[Tensor],
        states: list[Tensor],
        cu_seqlens: Tensor | None,
        scale: float,
        between: str,
    ) -> list[Tensor]:
        take = op if torch.compiler.is_compiling() else run
        return take(inputs, states, cu_seqlens, scale, between)

    return dispatch


def _fresh(x: Tensor) -> Tensor:
    """Return a copy: results of an op are no arguments, and have the strides of the fakes."""
    return x.clone(memory_format=torch.contiguous_format)
