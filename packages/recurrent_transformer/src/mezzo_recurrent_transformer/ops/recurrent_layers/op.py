"""The registered op: its schema, its fake and its gradient."""

import threading
from functools import partial
from typing import Any

import torch
from mezzo_core.ops.form import types_of
from mezzo_core.ops.gradients import register_gradient
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor

from mezzo_recurrent_transformer.ops.recurrent_layers import eager, graphs
from mezzo_recurrent_transformer.ops.recurrent_layers.backward import (
    Gradients,
    Kept,
    backward,
    of_past,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form, Past
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import Forward, forward, kept
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices, Pairs
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import (
    batches_of,
    padded,
    put_batch,
    take_batch,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Call, Parts

ARGUMENTS = {
    **types_of(Matrices),
    "slopes": "Tensor",
    **dict.fromkeys(Past._fields, "Tensor?"),
    "cu_seqlens": "Tensor?",
    **types_of(Form),
    "impl": "str",
}
"""The op's arguments after x, in their order, with their types; tensors come first."""
_SCHEMA = ", ".join(f"{type_} {name}" for name, type_ in ARGUMENTS.items())
_TENSORS = sum(type_.startswith("Tensor") for type_ in ARGUMENTS.values())
_IN_TURN = threading.RLock()
"""Calls share buffers and graphs, so one thread at a time may launch its work."""
_OPTIONS: dict[str, Any] = {"mutates_args": (), "tags": (torch.Tag.cudagraph_unsafe,)}
"""The ops keep buffers for later calls, and have CUDA graphs of their own. So torch.compile's
"reduce-overhead" may not put them in its graphs, whose memory must all be its own."""


def parts_of(impl: str) -> Parts:
    """Return the parts for an `impl`, "eager" or "triton"."""
    if impl == "eager":
        return eager
    from mezzo_recurrent_transformer.ops.recurrent_layers import triton

    return triton


def _by_name(arguments: tuple[Any, ...]) -> dict[str, Any]:
    return dict(zip(ARGUMENTS, arguments, strict=True))


def _call_of(given: dict[str, Any]) -> Call:
    weights = Matrices(*(given[name] for name in Matrices._fields))
    form = Form(*(given[name] for name in Form._fields))
    past = None
    if given["k"] is not None:
        k, v, lengths = (given[name] for name in Past._fields)
        past = Past(k.flatten(3), v.flatten(3), lengths.contiguous())
    return Call(weights, given["slopes"].contiguous(), past, form, parts_of(given["impl"]))


@torch.library.custom_op(
    "mezzo_recurrent_transformer::recurrent_layers",
    schema=f"(Tensor x, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor)",
    **_OPTIONS,
)
def _recurrent_layers(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return z (B, T, C), the stream (n + 1, B, T, C), and k and v (n, B, P + T, H, D).

    The stream is x and the outputs of all layers, for the backward, and empty if there is one
    layer. Without a past k and v are empty.
    """
    given = _by_name(arguments)
    with _IN_TURN, torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        return _run(x, _call_of(given), given["cu_seqlens"])


def _run(x: Tensor, call: Call, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n, (B, T, C) = call.weights.o.shape[0], x.shape
    k, v = (call.weights.o.new_empty(0) for _ in range(2))
    if x.numel() == 0:
        stream = x.new_empty(kept(n), B, T, C)
        if call.past is not None:
            k, v = (padded(t.to(k.dtype), t.shape[2] + T).clone() for t in call.past[:2])
    elif cu_seqlens is not None:
        check_borders("recurrent_layers", cu_seqlens.cpu(), T)  # it waits for them anyway
        stream = x.new_empty(kept(n), B, T, C)
        for index in batches_of(cu_seqlens):
            its = _forward(take_batch(x, index), call).stream
            put_batch(its[:, :, : index.shape[1]], index, stream)
    else:
        found = _forward(x, call)
        stream = found.stream[:, :, :T].contiguous()
        if call.past is not None:
            slots = call.past.k.shape[2] + T
            k, v = (t[:, :, :slots].contiguous() for t in (found.k, found.v))
    if call.past is not None:
        k, v = (t.unflatten(-1, (call.form.num_heads, -1)) for t in (k, v))
    # A copy: the gradient of a view would be as large as the stream.
    return (stream[0], x.new_empty(0), k, v) if n == 1 else (stream[-1].clone(), stream, k, v)


def _forward(x: Tensor, call: Call) -> Forward:
    """Run the layers over x (B, T, C), by a CUDA graph where it pays."""
    if call.past is not None:
        return forward(x, call)

    def run(x: Tensor, slopes: Tensor, *weights: Any) -> Forward:
        return forward(x, call._replace(slopes=slopes, weights=Matrices(*weights)))

    key, size = ("forward", call.form, call.parts), len(call.weights.o) * x.nbytes
    found: Any = graphs.run(run, (x, call.slopes, *call.weights), key, size)
    return Forward(*found)


@_recurrent_layers.register_fake
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    given = _by_name(arguments)
    o, k = given["o"], given["k"]
    n = o.shape[0]
    z = x.new_empty(x.shape), x.new_empty(0 if n == 1 else (kept(n), *x.shape))
    if k is None:
        return *z, o.new_empty(0), o.new_empty(0)
    grown = o.new_empty(*k.shape[:2], k.shape[2] + x.shape[1], *k.shape[3:])
    return *z, grown, torch.empty_like(grown)


@torch.library.custom_op(
    "mezzo_recurrent_transformer::recurrent_layers_bwd",
    schema=f"(Tensor dz, Tensor? dk, Tensor? dv, Tensor x, Tensor? z, {_SCHEMA}) -> Tensor[]",
    **_OPTIONS,
)
def _recurrent_layers_bwd(
    dz: Tensor, dk: Tensor | None, dv: Tensor | None, x: Tensor, z: Tensor | None, *arguments: Any
) -> list[Tensor]:
    """Return the gradients of the tensors that `_with_gradient` names; x and z are `Kept`'s."""
    given = _by_name(arguments)
    with _IN_TURN, torch.autocast(x.device.type, enabled=False), torch.cuda.device_of(x):
        found = _run_bwd(dz, dk, dv, Kept(x, z), _call_of(given), given["cu_seqlens"])
        gradients = {"x": found.x} | found.weights._asdict()
        gradients |= {} if found.past is None else found.past._asdict()
        like = given | {"x": x.new_empty(dz.shape)}
        return [
            gradients[name].to(like[name].dtype).reshape(like[name].shape).contiguous()
            for name in _with_gradient(given)
        ]


def _with_gradient(given: dict[str, Any]) -> list[str]:
    """Return the names of the tensors that have a gradient."""
    return ["x", *(name for name in (*Matrices._fields, "k", "v") if given[name] is not None)]


def _run_bwd(
    dz: Tensor,
    dk: Tensor | None,
    dv: Tensor | None,
    kept: Kept,
    call: Call,
    cu_seqlens: Tensor | None,
) -> Gradients:
    acc, past, dpairs = accumulation_dtype(call.weights.o.dtype), call.past, None
    if past is not None and (dk is not None or dv is not None):
        n, B, P, C = past.k.shape
        zeros = past.k.new_zeros(n, B, P + dz.shape[1], C)
        dpairs = Pairs(*(zeros if t is None else t.flatten(3) for t in (dk, dv)))
    if dz.numel() > 0 and cu_seqlens is None:
        return _backward(dz, dpairs, kept, call)
    dx = kept.x.new_zeros(dz.shape)
    sums = call.weights.map(lambda w: w.new_zeros(w.shape, dtype=acc))
    if dz.numel() > 0 and cu_seqlens is not None:
        for index in batches_of(cu_seqlens):
            its_kept = kept.map(partial(take_batch, index=index))
            its = _backward(take_batch(dz, index), None, its_kept, call)
            put_batch(its.x, index, dx)
            for total, part in zip(sums, its.weights, strict=True):
                if total is not None and part is not None:
                    total += part
    if past is None:
        return Gradients(dx, sums, None)
    if dpairs is None:
        return Gradients(dx, sums, Pairs(torch.zeros_like(past.k), torch.zeros_like(past.v)))
    return Gradients(dx, sums, of_past(dpairs, past))


def _backward(dz: Tensor, dpairs: Pairs | None, kept: Kept, call: Call) -> Gradients:
    """Go back through the layers, by a CUDA graph where it pays; arguments as of `backward`."""
    if call.past is not None:
        return backward(dz, dpairs, kept, call)

    def run(dz: Tensor, x: Tensor, z: Tensor | None, slopes: Tensor, *weights: Any) -> Any:
        its = call._replace(slopes=slopes, weights=Matrices(*weights))
        found = backward(dz, None, Kept(x, z), its)
        return found.x, *found.weights

    key, size = ("backward", call.form, call.parts), len(call.weights.o) * dz.nbytes
    found: Any = graphs.run(run, (dz, *kept, call.slopes, *call.weights), key, size)
    dx, *sums = found
    return Gradients(dx, Matrices(*sums), None)


@_recurrent_layers_bwd.register_vmap
def _(
    info: Any, in_dims: tuple[int | None, ...], *arguments: Any
) -> tuple[list[Tensor], list[int]]:
    """Run row after row: torch has no rule of its own for ops that return lists."""
    rows = [
        _recurrent_layers_bwd(
            *(
                x if dim is None else x.select(dim, i)
                for x, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for i in range(info.batch_size)
    ]
    found = [torch.stack(each) for each in zip(*rows, strict=True)]
    return found, [0] * len(found)


@_recurrent_layers_bwd.register_fake
def _(
    dz: Tensor, dk: Tensor | None, dv: Tensor | None, x: Tensor, z: Tensor | None, *arguments: Any
) -> list[Tensor]:
    given = _by_name(arguments)
    like = given | {"x": x.new_empty(dz.shape)}
    return [like[name].new_empty(like[name].shape) for name in _with_gradient(given)]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, *arguments = inputs
    tensors, ctx.rest = arguments[:_TENSORS], arguments[_TENSORS:]
    ctx.set_materialize_grads(False)
    z, stream, *_ = output
    kept = Kept(x, z) if stream.ndim == 1 else Kept(stream, None)
    ctx.save_for_backward(*kept, *tensors)


def _gradient(
    ctx: Any, dz: Tensor | None, unused: None, dk: Tensor | None, dv: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, z, *tensors = ctx.saved_tensors
    arguments = (*tensors, *ctx.rest)
    dz = x.new_zeros(x.shape[-3:]) if dz is None else dz
    found = _recurrent_layers_bwd(dz, dk, dv, x, z, *arguments)
    gradients = dict(zip(_with_gradient(_by_name(arguments)), found, strict=True))
    return tuple(gradients.get(name) for name in ("x", *ARGUMENTS))


differentiable_recurrent_layers = register_gradient(_recurrent_layers, _gradient, _save)
