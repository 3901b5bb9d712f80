"""The registered linear scan: its schema, its fake and its gradient."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mezzo_core.ops.gradients import function_of, register_gradient, undispatched
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.replay import replayed
from mezzo_core.ops.scan import reference


class Saved(NamedTuple):
    """The tensors that the backward needs."""

    a: Tensor
    out: Tensor
    initial_state: Tensor | None
    cu_seqlens: Tensor | None


@torch.library.custom_op("mezzo::linear_scan", mutates_args=())
def _linear_scan(
    a: Tensor,
    x: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Return h (B, T, D) and the last states; a chunk_size of 0 means one chunk."""
    if cu_seqlens is not None:  # torch.compile does not trace an op, so the CPU can read values
        check_borders("linear_scan", cu_seqlens, x.shape[1])
    if impl == "triton":
        from mezzo_core.ops.scan import triton

        return triton.linear_scan_fwd(a, x, initial_state, chunk_size, cu_seqlens)
    return reference.linear_scan_fwd(a, x, initial_state, chunk_size, cu_seqlens)


@_linear_scan.register_fake
def _(
    a: Tensor, x: Tensor, initial_state: Tensor | None, cu_seqlens: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor]:
    num_states = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    final = x.new_empty(num_states, x.shape[2], dtype=accumulation_dtype(x.dtype))
    return x.new_empty(x.shape), final


@torch.library.custom_op("mezzo::linear_scan_bwd", mutates_args=())
def _linear_scan_bwd(
    dout: Tensor,
    dfinal: Tensor,
    a: Tensor,
    out: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    chunk_size: int,
    impl: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return da, dx and the gradient of the initial state."""
    if impl == "triton":
        from mezzo_core.ops.scan import triton

        return triton.linear_scan_bwd(dout, dfinal, a, out, initial_state, chunk_size, cu_seqlens)
    return reference.linear_scan_bwd(dout, dfinal, a, out, initial_state, chunk_size, cu_seqlens)


@_linear_scan_bwd.register_fake
def _(
    dout: Tensor, dfinal: Tensor, a: Tensor, out: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return a.new_empty(a.shape), out.new_empty(out.shape), dfinal.new_empty(dfinal.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    a, _, initial_state, cu_seqlens, ctx.chunk_size, ctx.impl = inputs
    ctx.save_for_backward(*Saved(a, output[0], initial_state, cu_seqlens))


def _backward(ctx: Any, dout: Tensor, dfinal: Tensor) -> tuple[Tensor | None, ...]:
    saved = Saved(*ctx.saved_tensors)
    da, dx, dh0 = _call_bwd(dout, dfinal, *saved, ctx.chunk_size, ctx.impl)
    return da, dx, (None if saved.initial_state is None else dh0), None, None, None


_call_bwd = undispatched(_linear_scan_bwd, replayed(function_of(_linear_scan_bwd)))
differentiable_linear_scan = register_gradient(
    _linear_scan, _backward, _save, run=replayed(function_of(_linear_scan))
)
