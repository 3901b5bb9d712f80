"""The registered op: the Triton kernels with their schema, fake and gradient."""

from typing import Any

import torch
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.gradients import function_of, register_gradient
from mezzo_core.ops.replay import replayed
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.form import Form
from mezzo_drt.ops.grouped_cross_attention.readers import Readers, part_size, readers_of
from mezzo_drt.ops.grouped_cross_attention.saved import Saved

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor weights"
_READERS = "Tensor? order, Tensor? offsets, Tensor? parts, Tensor? chunks"
"""The tensors of `Readers`; if None, the backward computes them."""
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor)"


@torch.library.custom_op(
    "mezzo_drt::grouped_cross_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_READERS}, {schema_of(Form)}) -> (Tensor, Tensor)",
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    """Return out, like q, and lse as `Saved` describes it."""
    from mezzo_drt.ops.grouped_cross_attention.triton.forward import attend

    with torch.cuda.device_of(q):
        return attend(q, k, v, indices, weights, Form(*rest[4:]))


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor, Tensor]:
    _, _, M, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*indices.shape, H, M), dtype=torch.float32)


@torch.library.custom_op(
    "mezzo_drt::grouped_cross_attention_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, {_TENSORS}, Tensor lse, {_READERS}, {schema_of(Form)}) -> {_GRADIENTS}",
)
def _attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    weights: Tensor,
    lse: Tensor,
    order: Tensor | None,
    offsets: Tensor | None,
    parts: Tensor | None,
    chunks: Tensor | None,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and dweights."""
    from mezzo_drt.ops.grouped_cross_attention.triton.backward import queries_bwd
    from mezzo_drt.ops.grouped_cross_attention.triton.chunks import chunks_bwd

    saved, S, R = Saved(q, k, v, indices, weights, lse), k.shape[1], indices.shape[2]
    with torch.cuda.device_of(q):
        if order is None or offsets is None or parts is None or chunks is None:
            readers = readers_of(indices, S)
        else:
            readers = Readers(order, offsets, parts, chunks, part_size(R))
        dout = dout.contiguous()
        dq, stats = queries_bwd(dout, saved, Form(*form))
        dk, dv = chunks_bwd(dout, saved, dq, stats, readers, Form(*form))
        return dq, dk, dv, stats[..., 1].sum((3, 4))


@_attention_bwd.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dweights = (x.new_empty(x.shape) for x in (q, k, v, weights))
    return dq, dk, dv, dweights


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, indices, weights, *rest = inputs
    ctx.form = Form(*rest[4:])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*Saved(q, k, v, indices, weights, output[1]), *rest[:4])


def _backward(ctx: Any, dout: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:  # callers use out only
        return (None,) * 11
    dq, dk, dv, dweights = _attention_bwd(dout, *ctx.saved_tensors, *ctx.form)
    return dq, dk, dv, None, dweights, *(None,) * 6


differentiable_attention = register_gradient(
    _attention, _backward, _save, run=replayed(function_of(_attention))
)
