"""The registered op: its schema, its fake and its gradient."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from mezzo_core.ops.gradients import register_gradient
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers import graphs, packing
from mezzo_recurrent_transformer.ops.recurrent_layers.backward import (
    Gradients,
    backward,
    of_past,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import Forward, forward, kept
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.parts import parts_of
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import padded

_TENSORS = (
    "Tensor qkv, Tensor o, Tensor up, Tensor down, Tensor? n1, Tensor? n2, "
    "Tensor? q_norm, Tensor? k_norm, Tensor slopes, Tensor? k, Tensor? v, Tensor? seen, "
    "Tensor? cu_seqlens"
)
_FORM = (
    "SymInt num_heads, float residual_scale, str norm, float eps, bool persistent_norm, "
    "SymInt block_size, str impl"
)
_WEIGHTS = len(Matrices._fields)
_OTHERS = _WEIGHTS + 5
"""Tensors of a call besides x."""
_IN_TURN = threading.RLock()
"""Calls share buffers and graphs: no thread may launch its work in between another's."""


class Inputs(NamedTuple):
    """What a call computes with, besides x."""

    weights: Matrices
    slopes: Tensor
    past: tuple[Tensor, Tensor, Tensor] | None
    cu_seqlens: Tensor | None
    form: Form
    impl: str

    @classmethod
    def of(cls, *arguments: Any) -> "Inputs":
        """Return it from the arguments of the registered op that follow x."""
        weights, rest = Matrices(*arguments[:_WEIGHTS]), arguments[_WEIGHTS:]
        slopes, k, v, seen, cu_seqlens, *form, impl = rest
        past = None if k is None else (k.flatten(3), v.flatten(3), seen.contiguous())
        return cls(weights, slopes.contiguous(), past, cu_seqlens, Form(*form), impl)

    @property
    def n(self) -> int:
        """The number of layers."""
        return self.weights.o.shape[0]

    def forward(self, x: Tensor) -> Forward:
        """Run the layers over x (B, T, C)."""
        parts = parts_of(self.impl)
        if self.past is not None:
            return forward(x, self.weights, self.slopes, self.past, self.form, parts)

        def call(tensors: Sequence[Any]) -> Forward:
            x, slopes, *weights = tensors
            return forward(x, Matrices(*weights), slopes, None, self.form, parts)

        key, size = ("forward", self.form, self.impl), self.n * x.nbytes
        return Forward(*graphs.run(call, (x, self.slopes, *self.weights), key, size))

    def backward(
        self, dz: Tensor, dpairs: tuple[Tensor, Tensor] | None, kept: Sequence[Tensor]
    ) -> Gradients:
        """Go back through the layers; arguments as `backward` has them."""
        parts = parts_of(self.impl)
        if self.past is not None:
            rest = (self.weights, self.slopes, self.past, self.form, parts)
            return backward(dz, dpairs, kept, *rest)

        def call(tensors: Sequence[Any]) -> list[Tensor]:
            dz, slopes, *rest = tensors
            kept, weights = rest[:-_WEIGHTS], Matrices(*rest[-_WEIGHTS:])
            found = backward(dz, None, kept, weights, slopes, None, self.form, parts)
            return [found.x, *(total for total in found.weights if total is not None)]

        key, size = ("backward", self.form, self.impl), self.n * dz.nbytes
        tensors = (dz, self.slopes, *kept, *self.weights)
        dx, *sums = graphs.run(call, tensors, key, size)
        totals = iter(sums)
        return Gradients(dx, self.weights.map(lambda w: next(totals)), None)


@torch.library.custom_op(
    "mezzo_recurrent_transformer::recurrent_layers",
    mutates_args=(),
    schema=f"(Tensor x, {_TENSORS}, {_FORM}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _recurrent_layers(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z (B, T, C), the stream (n + 1, B, T, C), and k and v (n, B, P + T, H, D).

    The stream is x and the outputs of all layers, for the backward, and empty if there is one
    layer. Without a past k and v are empty.
    """
    with _IN_TURN, torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        return _run(Inputs.of(*arguments), x)


def _run(call: Inputs, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, (B, T, C) = call.n, x.shape
    k, v = (call.weights.o.new_empty(0) for _ in range(2))
    if x.numel() == 0:
        stream = x.new_empty(kept(n), B, T, C)
        if call.past is not None:
            k, v = (padded(t.to(k.dtype), t.shape[2] + T).clone() for t in call.past[:2])
    elif call.cu_seqlens is not None:
        check_borders("recurrent_layers", call.cu_seqlens.cpu(), T)  # it waits for them anyway
        stream = x.new_empty(kept(n), B, T, C)
        for index in packing.batches_of(call.cu_seqlens):
            its = call.forward(packing.take(x, index)).stream
            packing.put(its[:, :, : index.shape[1]], index, stream)
    else:
        found = call.forward(x)
        stream = found.stream[:, :, :T].contiguous()
        if call.past is not None:
            slots = call.past[0].shape[2] + T
            k, v = (t[:, :, :slots].contiguous() for t in found[1:])
    if call.past is not None:
        k, v = (t.unflatten(-1, (call.form.num_heads, -1)) for t in (k, v))
    # A result of its own, so that no gradient of all layers' outputs is made.
    return (stream[0], x.new_empty(0), k, v) if n == 1 else (stream[-1].clone(), stream, k, v)


@_recurrent_layers.register_fake
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    o, k = arguments[Matrices._fields.index("o")], arguments[_WEIGHTS + 1]
    n = o.shape[0]
    z = x.new_empty(x.shape), x.new_empty(0 if n == 1 else (kept(n), *x.shape))
    if k is None:
        return *z, o.new_empty(0), o.new_empty(0)
    grown = o.new_empty(*k.shape[:2], k.shape[2] + x.shape[1], *k.shape[3:])
    return *z, grown, torch.empty_like(grown)


@torch.library.custom_op(
    "mezzo_recurrent_transformer::recurrent_layers_bwd",
    mutates_args=(),
    schema=f"(Tensor dz, Tensor? dk, Tensor? dv, Tensor x, Tensor? z, {_TENSORS}, {_FORM})"
    " -> Tensor[]",
)
def _recurrent_layers_bwd(
    dz: Tensor, dk: Tensor | None, dv: Tensor | None, x: Tensor, z: Tensor | None, *arguments: Any
) -> list[Tensor]:
    """Return dx, the gradients of the weights that there are, and those of k and v if there are.

    Of one layer x and z are its inputs and outputs; of several x is the stream, and z None.
    """
    kept = [x] if z is None else [x, z]
    with _IN_TURN, torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        return _run_bwd(Inputs.of(*arguments), dz, dk, dv, kept)


def _run_bwd(
    call: Inputs, dz: Tensor, dk: Tensor | None, dv: Tensor | None, kept: list[Tensor]
) -> list[Tensor]:
    acc = accumulation_dtype(call.weights.o.dtype)
    sums = call.weights.map(lambda w: w.new_zeros(w.shape, dtype=acc))
    found = Gradients(kept[0].new_zeros(dz.shape), sums, None)
    dpairs = None
    if call.past is not None and (dk is not None or dv is not None):
        k = call.past[0]
        like = k.new_zeros(*k.shape[:2], k.shape[2] + dz.shape[1], k.shape[3])
        dk, dv = (like if t is None else t.flatten(3) for t in (dk, dv))
        dpairs = (dk, dv)
    if dz.numel() == 0:
        if call.past is not None and dpairs is not None:
            found = found._replace(past=of_past(dpairs, call.past))
    elif call.cu_seqlens is not None:
        for index in packing.batches_of(call.cu_seqlens):
            dz_, *kept_ = (packing.take(t, index) for t in (dz, *kept))
            its = call.backward(dz_, None, kept_)
            packing.put(its.x, index, found.x)
            for total, part in zip(sums, its.weights, strict=True):
                if total is not None and part is not None:
                    total += part
    else:
        found = call.backward(dz, dpairs, kept)
    pairs = zip(found.weights, call.weights, strict=True)
    weights = [total.to(w.dtype) for total, w in pairs if total is not None and w is not None]
    dx = found.x.to(kept[0].dtype).contiguous()
    if call.past is None:
        return [dx, *weights]
    dpast = found.past or tuple(torch.zeros_like(t) for t in call.past[:2])
    heads = (call.form.num_heads, -1)
    past = [t.to(p.dtype).unflatten(-1, heads) for t, p in zip(dpast, call.past, strict=False)]
    return [dx, *weights, *past]


@_recurrent_layers_bwd.register_fake
def _(
    dz: Tensor, dk: Tensor | None, dv: Tensor | None, x: Tensor, z: Tensor | None, *arguments: Any
) -> list[Tensor]:
    inputs = (*arguments[:_WEIGHTS], *arguments[_WEIGHTS + 1 : _WEIGHTS + 3])
    dx = x.new_empty(dz.shape)
    return [dx, *(t.new_empty(t.shape) for t in inputs if t is not None)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *tensors = inputs[: 1 + _OTHERS]
    ctx.form = inputs[1 + _OTHERS :]
    ctx.set_materialize_grads(False)
    z, stream, *_ = output
    n = tensors[0].shape[0]
    ctx.save_for_backward(*((x, z) if n == 1 else (stream, None)), *tensors)


def _backward(
    ctx: Any, dz: Tensor | None, unused: None, dk: Tensor | None, dv: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, z, *tensors = ctx.saved_tensors
    dz = x.new_zeros(x.shape[-3:]) if dz is None else dz
    found = iter(_recurrent_layers_bwd(dz, dk, dv, x, z, *tensors, *ctx.form))
    dx = next(found)
    weights = [None if w is None else next(found) for w in tensors[:_WEIGHTS]]
    _, k, v, *_ = tensors[_WEIGHTS:]
    past = [None if t is None else next(found) for t in (k, v)]
    return dx, *weights, None, *past, None, None, *(None,) * len(ctx.form)


differentiable_recurrent_layers = register_gradient(_recurrent_layers, _backward, _save)
