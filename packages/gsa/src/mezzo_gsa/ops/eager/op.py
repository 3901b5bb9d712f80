"""Loops of eager PyTorch as one op of a compiled graph.

torch.compile would unroll a loop over tokens or chunks, and spend minutes to compile code that runs
in milliseconds. So the loop is one op there. Outside torch.compile it is plain eager code, which
autograd differentiates.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mezzo_core.ops.gradients import saveable
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.precision import without_autocast
from torch import Tensor

EagerForm = Callable[[list[Tensor], list[Tensor], Tensor | None, float, str], list[Tensor]]
"""Its arguments: [q, k, v, ...] of at least one token, the states before the first token, the
borders of packed sequences, the scale of q, and the function between two passes or the reading of
the paper ("" for GLA). Its results: out (B, T, HQ, V) and the last states."""

ARGUMENTS = "Tensor[] inputs, Tensor[] states, Tensor? cu_seqlens, float scale, str between"


def eager_op(
    name: str, compute: Callable[..., tuple[Tensor, Any]], state_type: Any = None
) -> EagerForm:
    """Return `compute` without autocast and with a check of the borders; one op in compiled graphs.

    The op's backward runs it again, and differentiates that run by autograd.

    Args:
        name: of the op.
        compute: takes the inputs, scale and between (unless it is ""), the state and the borders.
        state_type: the named tuple of the states; None: there is one state, a tensor.
    """
    run = partial(_run, name, compute, state_type)

    def forward(*arguments: Any) -> list[Tensor]:
        return [_fresh(x) for x in run(*arguments)]

    def backward(*arguments: Any) -> list[Tensor]:
        return [_fresh(x) for x in _gradients(run, *arguments)]

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
    op.register_fake(_fake)
    op_bwd.register_fake(_fake_backward)
    op.register_autograd(pull, setup_context=_save)

    def dispatch(
        inputs: list[Tensor],
        states: list[Tensor],
        cu_seqlens: Tensor | None,
        scale: float,
        between: str,
    ) -> list[Tensor]:
        # An export to ONNX knows no registered op, and writes the loop down.
        if torch.compiler.is_compiling() and not torch.onnx.is_in_onnx_export():
            return op(inputs, states, cu_seqlens, scale, between)
        return run(inputs, [saveable(x) for x in states], cu_seqlens, scale, between)

    return dispatch


def _run(
    name: str,
    compute: Callable[..., tuple[Tensor, Any]],
    state_type: Any,
    inputs: list[Tensor],
    states: list[Tensor],
    cu_seqlens: Tensor | None,
    scale: float,
    between: str,
) -> list[Tensor]:
    if cu_seqlens is not None:
        check_borders(name, cu_seqlens, inputs[0].shape[1])
    if not inputs[0].shape[1]:  # no tokens: the empty output still depends on all inputs
        copies = (x.clone() for x in states)  # a step may overwrite the result
        return [_outputs(inputs).zero_() + sum(x.sum() for x in inputs), *copies]
    # Autocast would compute the products of float32 states in 16 bits.
    with without_autocast(inputs[0].device):
        state = state_type(*states) if state_type else states[0]
        words = (between,) if between else ()
        out, last = compute(*inputs, scale, *words, state, cu_seqlens)
    return [out, *last] if state_type else [out, last]


def _gradients(
    run: Callable[..., list[Tensor]],
    dresults: list[Tensor | None],
    inputs: list[Tensor],
    states: list[Tensor],
    *rest: Any,
) -> list[Tensor]:
    # An op's body runs without autograd: enable it.
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (*inputs, *states)]
        results = run(leaves[: len(inputs)], leaves[len(inputs) :], *rest)
        pairs = [(y, dy) for y, dy in zip(results, dresults, strict=True) if dy is not None]
        if not pairs:
            return [torch.zeros_like(x) for x in leaves]
        ys, dys = zip(*pairs, strict=True)
        return [*torch.autograd.grad(ys, leaves, dys, materialize_grads=True)]


def _fake(inputs: list[Tensor], states: list[Tensor], *_: Any) -> list[Tensor]:
    return [_outputs(inputs), *(x.new_empty(x.shape) for x in states)]


def _fake_backward(
    dresults: list[Tensor | None], inputs: list[Tensor], states: list[Tensor], *_: Any
) -> list[Tensor]:
    return [x.new_empty(x.shape) for x in (*inputs, *states)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    parts, states, cu_seqlens, *ctx.form = inputs
    ctx.num_inputs = len(parts)
    ctx.save_for_backward(*parts, *states, cu_seqlens)
    # Often only `out` has a gradient: None costs less than zeros.
    ctx.set_materialize_grads(False)


def _outputs(inputs: list[Tensor]) -> Tensor:
    """Return an empty tensor for out (B, T, HQ, V)."""
    q, v = inputs[0], inputs[2]
    return q.new_empty(*q.shape[:3], v.shape[3])


def _fresh(x: Tensor) -> Tensor:
    """Return a contiguous copy: results must not alias arguments, and must match the fakes."""
    return x.clone(memory_format=torch.contiguous_format)
