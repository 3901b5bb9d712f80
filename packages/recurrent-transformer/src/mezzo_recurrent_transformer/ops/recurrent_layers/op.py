"""The registered op: its schema, its fake and its gradient."""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.gradients import register_gradient
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers import packing
from mezzo_recurrent_transformer.ops.recurrent_layers.backward import backward
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import forward
from mezzo_recurrent_transformer.ops.recurrent_layers.parts import Matrices, parts_of

_TENSORS = (
    "Tensor x, Tensor qkv, Tensor o, Tensor up, Tensor down, Tensor? n1, Tensor? n2, "
    "Tensor? q_norm, Tensor? k_norm, Tensor slopes, Tensor? k, Tensor? v, Tensor? seen, "
    "Tensor? cu_seqlens"
)
_FORM = (
    "SymInt num_heads, float residual_scale, str norm, float eps, bool persistent_norm, "
    "SymInt block_size, str impl"
)
_WEIGHTS = len(Matrices._fields)


class Inputs(NamedTuple):
    """The tensors of a call."""

    x: Tensor
    weights: Matrices
    slopes: Tensor
    past: tuple[Tensor, Tensor, Tensor] | None
    cu_seqlens: Tensor | None
    form: Form
    impl: str

    @classmethod
    def of(cls, x: Tensor, *arguments: Any) -> "Inputs":
        """Return them from the arguments of the registered op."""
        weights, rest = Matrices(*arguments[:_WEIGHTS]), arguments[_WEIGHTS:]
        slopes, k, v, seen, cu_seqlens, *form, impl = rest
        past = None if k is None else (k.flatten(3), v.flatten(3), seen)
        return cls(x, weights, slopes, past, cu_seqlens, Form(*form), impl)


@torch.library.custom_op(
    "mezzo_recurrent_transformer::recurrent_layers",
    mutates_args=(),
    schema=f"({_TENSORS}, {_FORM}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _recurrent_layers(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z (B, T, C), z of all layers (n, B, T, C), and k and v (n, B, P + T, H, D).

    z of all layers is for the backward, and empty if there is one layer. Without a past k and v are
    empty.
    """
    call = Inputs.of(x, *arguments)
    n, (B, T, C) = call.weights.o.shape[0], x.shape
    none = call.weights.o.new_empty(0)
    with torch.autocast(x.device.type, enabled=False):
        rest = (call.weights, call.slopes, call.past, call.form, parts_of(call.impl))
        if T == 0 or B == 0:
            past = call.past or (none, none)
            k, v = (t.to(none.dtype, copy=True) for t in past[:2])
            z = x.new_empty(n, B, T, C)
        elif call.cu_seqlens is not None:
            check_borders("recurrent_layers", call.cu_seqlens, T)
            z, k, v = x.new_empty(n, B, T, C), none, torch.empty_like(none)
            for index in packing.batches_of(call.cu_seqlens):
                found = forward(packing.take(x, index), *rest)
                packing.put(found.z[:, :, : index.shape[1]], index, z)
        else:
            z, k, v = forward(x, *rest)
            z = z[:, :, :T].contiguous()
            P = 0 if call.past is None else call.past[0].shape[2]
            k, v = (t[:, :, : P + T].contiguous() for t in (k, v))
    if call.past is None:
        k, v = none, torch.empty_like(none)
    else:
        k, v = (t.unflatten(-1, (call.form.num_heads, -1)) for t in (k, v))
    # A result of its own, so that no gradient of all layers' outputs is made.
    return (z[0], x.new_empty(0), k, v) if n == 1 else (z[-1].clone(), z, k, v)


@_recurrent_layers.register_fake
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, k = arguments[Matrices._fields.index("o")], arguments[_WEIGHTS + 1]
    n = o.shape[0]
    z = x.new_empty(x.shape), x.new_empty(0 if n == 1 else (n, *x.shape))
    if k is None:
        return *z, o.new_empty(0), o.new_empty(0)
    grown = o.new_empty(*k.shape[:2], k.shape[2] + x.shape[1], *k.shape[3:])
    return *z, grown, torch.empty_like(grown)


@torch.library.custom_op(
    "mezzo_recurrent_transformer::recurrent_layers_bwd",
    mutates_args=(),
    schema=f"(Tensor dz, Tensor? dk, Tensor? dv, Tensor z, {_TENSORS}, {_FORM}) -> Tensor[]",
)
def _recurrent_layers_bwd(
    dz: Tensor, dk: Tensor | None, dv: Tensor | None, z: Tensor, x: Tensor, *arguments: Any
) -> list[Tensor]:
    """Return dx, the gradients of the weights that there are, and those of k and v if there are."""
    call = Inputs.of(x, *arguments)
    acc = accumulation_dtype(call.weights.o.dtype)
    sums = Matrices(*(None if w is None else torch.zeros_like(w, dtype=acc) for w in call.weights))
    dx, dpast = torch.zeros_like(x), None
    with torch.autocast(x.device.type, enabled=False):
        rest = (call.weights, call.slopes, call.past, call.form, parts_of(call.impl))
        if x.numel() == 0:
            pass
        elif call.cu_seqlens is not None:
            for index in packing.batches_of(call.cu_seqlens):
                parts = (packing.take(t, index) for t in (dz, x, z))
                dz_, x_, z_ = parts
                found = backward(dz_, None, x_, z_, *rest)
                packing.put(found.x, index, dx)
                for total, part in zip(sums, found.weights, strict=True):
                    if total is not None:
                        total += part
        else:
            given = None
            if dk is not None or dv is not None:
                given = tuple(
                    _given(t, call.past, x) if t is None else t.flatten(3) for t in (dk, dv)
                )
            found = backward(dz, given, x, z, *rest)
            dx, sums, dpast = found.x.to(x.dtype), found.weights, found.past
    weights = [
        total.to(w.dtype) for total, w in zip(sums, call.weights, strict=True) if w is not None
    ]
    if call.past is None:
        return [dx, *weights]
    k, v = call.past[:2]
    dpast = dpast or (torch.zeros_like(k), torch.zeros_like(v))
    heads = (call.form.num_heads, -1)
    return [dx, *weights, *(t.to(k.dtype).unflatten(-1, heads) for t in dpast)]


def _given(t: None, past: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Tensor:
    n, B, P, C = past[0].shape
    return past[0].new_zeros(n, B, P + x.shape[1], C)


@_recurrent_layers_bwd.register_fake
def _(
    dz: Tensor, dk: Tensor | None, dv: Tensor | None, z: Tensor, x: Tensor, *arguments: Any
) -> list[Tensor]:
    weights = [torch.empty_like(w) for w in arguments[:_WEIGHTS] if w is not None]
    past = [torch.empty_like(t) for t in arguments[_WEIGHTS + 1 : _WEIGHTS + 3] if t is not None]
    return [torch.empty_like(x), *weights, *past]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors = inputs[: 1 + _WEIGHTS + 5]
    ctx.form = inputs[len(tensors) :]
    ctx.set_materialize_grads(False)
    last, z, *_ = output
    ctx.save_for_backward(last[None] if z.numel() == 0 else z, *tensors)


def _backward(
    ctx: Any, dz: Tensor | None, unused: None, dk: Tensor | None, dv: Tensor | None
) -> tuple[Tensor | None, ...]:
    z, x, *tensors = ctx.saved_tensors
    dz = torch.zeros_like(x) if dz is None else dz
    found = iter(_recurrent_layers_bwd(dz, dk, dv, z, x, *tensors, *ctx.form))
    dx = next(found)
    weights = [None if w is None else next(found) for w in tensors[:_WEIGHTS]]
    _, k, v, *_ = tensors[_WEIGHTS:]
    past = [None if t is None else next(found) for t in (k, v)]
    return dx, *weights, None, *past, None, None, *(None,) * len(ctx.form)


differentiable_recurrent_layers = register_gradient(_recurrent_layers, _backward, _save)
