"""The registered op: the Triton kernels with their schema, fake and gradient."""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.gradients import register_gradient
from torch import Tensor

from mezzo_drt.ops.grouped_cross_attention.form import Form
from mezzo_drt.ops.grouped_cross_attention.readers import readers_of

_TENSORS = "Tensor q, Tensor k, Tensor v, Tensor indices, Tensor weights"
_FORM = "bool softmax1, float scale"


class Saved(NamedTuple):
    """The tensors that the backward needs: what each chunk gave is computed anew."""

    q: Tensor
    """(B, N, M, H, D)."""
    k: Tensor
    """(B, S, L, H, D)."""
    v: Tensor
    """(B, S, L, H, D)."""
    indices: Tensor
    """(B, N, R) int64."""
    weights: Tensor
    """(B, N, R) float32."""
    lse: Tensor
    """(B, N, R, H, M) float32: natural log-sum-exp of a query's logits over one chunk."""


@torch.library.custom_op(
    "mezzo_drt::grouped_cross_attention",
    mutates_args=(),
    schema=f"({_TENSORS}, {_FORM}) -> (Tensor, Tensor)",
)
def _attention(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, *form: Any
) -> tuple[Tensor, Tensor]:
    """Return out, like q, and lse as `Saved` describes it."""
    from mezzo_drt.ops.grouped_cross_attention.triton.forward import attend

    with torch.cuda.device_of(q):
        return attend(q, k, v, indices, weights, Form(*form))


@_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, *form: Any
) -> tuple[Tensor, Tensor]:
    _, _, M, H, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((*indices.shape, H, M), dtype=torch.float32)


@torch.library.custom_op(
    "mezzo_drt::grouped_cross_attention_bwd",
    mutates_args=(),
    schema=f"(Tensor dout, {_TENSORS}, Tensor lse, {_FORM}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _attention_bwd(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    indices: Tensor,
    weights: Tensor,
    lse: Tensor,
    *form: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv and dweights."""
    from mezzo_drt.ops.grouped_cross_attention.triton.backward import queries_bwd
    from mezzo_drt.ops.grouped_cross_attention.triton.chunks import chunks_bwd

    saved = Saved(q, k, v, indices, weights, lse)
    with torch.cuda.device_of(q):
        dout = dout.contiguous()
        dq, stats = queries_bwd(dout, saved, Form(*form))
        dk, dv = chunks_bwd(dout, saved, stats, readers_of(indices, k.shape[1]), Form(*form))
        return dq, dk, dv, stats[..., 1].sum((3, 4))


@_attention_bwd.register_fake
def _(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, indices: Tensor, weights: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dweights = (x.new_empty(x.shape) for x in (q, k, v, weights))
    return dq, dk, dv, dweights


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, indices, weights, *form = inputs
    ctx.form = Form(*form)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*Saved(q, k, v, indices, weights, output[1]))


def _backward(ctx: Any, dout: Tensor | None, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:  # callers use out only
        return (None,) * 7
    dq, dk, dv, dweights = _attention_bwd(dout, *Saved(*ctx.saved_tensors), *ctx.form)
    return dq, dk, dv, None, dweights, None, None


differentiable_attention = register_gradient(_attention, _backward, _save)
