"""The registered gated scan: its schema, its fake and its gradient."""

from typing import Any

import torch
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.gradients import register_gradient, undispatched
from mezzo_core.ops.packed import check_borders
from torch import Tensor

from mezzo_rat.ops.gated_scan.saved import Saved

STATE_EVERY = 8
"""The forward saves the state before every 8th token; the backward recomputes those between."""


@torch.library.custom_op("mezzo_rat::gated_scan", mutates_args=())
def _gated_scan(
    zvg: Tensor,
    gate_bias: Tensor | None,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
    differentiable: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out (B, T, C), the last states, and the states saved for the backward (B, N, C)."""
    from mezzo_rat.ops.gated_scan.triton.forward import gated_scan_fwd

    if cu_seqlens is not None:  # torch.compile does not trace an op, so the CPU can read values
        check_borders("gated_scan", cu_seqlens, zvg.shape[1])
    return gated_scan_fwd(
        zvg, gate_bias, initial_state, cu_seqlens, lengths, STATE_EVERY if differentiable else 0
    )


@_gated_scan.register_fake
def _(
    zvg: Tensor, gate_bias: object, initial_state: object, cu_seqlens: Tensor | None, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    _lengths, differentiable = rest
    B, T, C = zvg.shape[0], zvg.shape[1], zvg.shape[2] // 3
    num_states = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    num_kept = (T + STATE_EVERY - 1) // STATE_EVERY if differentiable else 0
    return (
        zvg.new_empty(B, T, C),
        zvg.new_empty(num_states, C, dtype=torch.float32),
        zvg.new_empty(B, num_kept, C, dtype=torch.float32),
    )


@torch.library.custom_op(
    "mezzo_rat::gated_scan_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, Tensor? dfinal, {schema_of(Saved)}) -> (Tensor, Tensor, Tensor)",
)
def _gated_scan_bwd(
    dout: Tensor, dfinal: Tensor | None, *saved: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dzvg, dbias and the gradients of the initial states."""
    from mezzo_rat.ops.gated_scan.triton.backward import gated_scan_bwd

    return gated_scan_bwd(dout, dfinal, Saved(*saved), STATE_EVERY)


@_gated_scan_bwd.register_fake
def _(dout: Tensor, dfinal: Tensor | None, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    zvg, _, _, cu_seqlens, _, kept = Saved(*saved)
    C = kept.shape[2]
    num_states = zvg.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return zvg.new_empty(zvg.shape), kept.new_empty(C), kept.new_empty(num_states, C)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    zvg, gate_bias, initial_state, cu_seqlens, lengths, _ = inputs
    _, _, kept = output
    ctx.save_for_backward(*Saved(zvg, gate_bias, initial_state, cu_seqlens, lengths, kept))
    # The saved states never have a gradient, the final state seldom: None costs less than zeros.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, dout: Tensor | None, dfinal: Tensor | None, dkept: None
) -> tuple[Tensor | None, ...]:
    saved = Saved(*ctx.saved_tensors)
    if dout is None:
        B, T, _ = saved.zvg.shape
        dout = saved.zvg.new_zeros(()).expand(B, T, saved.kept.shape[2])
    dzvg, dbias, dh0 = _call_bwd(dout, dfinal, *saved)
    return (
        dzvg,
        None if saved.gate_bias is None else dbias,
        None if saved.initial_state is None else dh0,
        None,
        None,
        None,
    )


_call_bwd = undispatched(_gated_scan_bwd)
differentiable_gated_scan = register_gradient(_gated_scan, _backward, _save)
