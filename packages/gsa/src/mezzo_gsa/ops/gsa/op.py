"""The registered op of gated slot attention's kernels: its schema, its fake and its gradient.

It takes separate tensors, or a projection with q, k, v and the gates' logits side by side. A
projection is read in place and has one gradient, so nothing is split or concatenated.
"""

from functools import partial
from typing import Any

import torch
from mezzo_core.ops.ahead import compile_ahead
from mezzo_core.ops.form import schema_of
from mezzo_core.ops.gradients import register_gradient, undispatched
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.replay import replayed
from torch import Tensor

from mezzo_gsa.ops.chunking.by_token import by_token
from mezzo_gsa.ops.chunking.chunks import place_chunks
from mezzo_gsa.ops.gsa.arguments import Form
from mezzo_gsa.ops.gsa.request import (
    Inputs,
    Memory,
    Request,
    Saved,
    Tensors,
    chunk_length,
    gate_tiles,
)


def _read(arguments: tuple[Any, ...]) -> tuple[Tensors, Form]:
    """Return the arguments of the op by name; the projection is contiguous."""
    n = len(Tensors._fields)
    x, *rest = arguments[:n]
    return Tensors(None if x is None else x.contiguous(), *rest), Form(*arguments[n:])


def _request(t: Tensors, form: Form, swished: Tensor | None) -> Request:
    """Return the request, with inputs that kernels can read; `swished` is x after swish."""
    parts, raw = t.parts(form), None
    if swished is not None:
        parts, raw = form.split(swished)._replace(g=parts.g), parts
    q, k, v, g = (by_token(part) for part in parts)
    x = Inputs(q, k, v, g, None if t.s is None else t.s.contiguous())
    B, T, _, M = g.shape
    length = chunk_length(k.dtype, M, T if t.cu_seqlens is None else None)
    return Request(x, t.k0, t.v0, place_chunks(B, T, length, t.cu_seqlens), form, raw)


def _gsa(*arguments: Any) -> tuple[Any, ...]:
    """Return out, the last K~ and V~, and the tensors of `Saved`; see `chunk_gsa`."""
    from mezzo_gsa.ops.gsa.triton import launches

    t, form = _read(arguments)
    q = next(x for x in t.inputs if x is not None)  # or the projection
    # torch.compile does not trace an op, so the CPU can read the values here.
    if t.cu_seqlens is not None:
        check_borders("chunk_gsa", t.cu_seqlens, q.shape[1])
    if q.is_cuda:  # and not Triton's interpreter
        sizes = [None if x is None else (x.dtype, x.shape[2:]) for x in t]
        longest = q.shape[1] if t.cu_seqlens is None else None
        key = q.device, form, chunk_length(q.dtype, 1, longest), *sizes
        compile_ahead(key, partial(_call_both, form.keep, arguments))
    with torch.cuda.device_of(q):
        swished = launches.apply_swish(t.x) if t.x is not None and form.swish else None
        out, k_last, v_last, saved = launches.run_forward(_request(t, form, swished))
    if form.keep == "states":
        saved = saved._replace(swished=swished)
    return out, k_last, v_last, *saved.tensors


def _registered_gsa(*arguments: Any) -> tuple[Tensor, ...]:
    return _filled(*_gsa(*arguments))


def _filled(out: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
    """Return the results with empty tensors in place of None, which no op can return."""
    # They must be different tensors, even if they are empty.
    return out, *[out.new_empty(0) if x is None else x for x in others]


def _call_both(keep: str, arguments: tuple[Any, ...]) -> None:
    """Call the forward and, if it keeps something for it, the backward."""
    out, _, _, *saved = _gsa(*arguments)
    if keep != "nothing":
        _gsa_bwd(out, None, None, saved, *arguments)


def _gsa_fake(*arguments: Any) -> tuple[Tensor, ...]:
    t, form = _read(arguments)
    q, k, v, g = t.parts(form)
    (B, T, HQ, K), (H, V, M) = q.shape, (*v.shape[2:], g.shape[3])
    fp32, dtype = torch.float32, q.dtype
    results = (q.new_empty(B, T, HQ, V), *_fake_memories(k, v, g, t.cu_seqlens))
    if form.keep == "nothing":
        return _filled(*results, *Saved().tensors)
    saved = Saved(q.new_empty(B, T, HQ, M, dtype=fp32), q.new_empty(B, T, HQ, M))
    if form.keep == "weights":
        return _filled(*results, *saved.tensors)
    # T may be a symbol, so it does not shorten the chunks here: short rows have one chunk anyway.
    chunks = place_chunks(B, T, chunk_length(dtype, M), t.cu_seqlens)
    N, NS = chunks.num_chunks, chunks.num_segments
    has_starts = chunks.is_split or t.k0 is not None
    memory = Memory(
        running=q.new_empty(B, T, H, M, dtype=torch.float64 if dtype == fp32 else fp32),
        strength=q.new_empty(B, T, H, M, dtype=fp32),
        write=q.new_empty(B, T, H, M),
        decay=q.new_empty(N, H, M, dtype=fp32),
        bands=q.new_empty(N, H, gate_tiles(M), dtype=torch.int32),
        kept=q.new_empty(N, H, M, dtype=fp32),
        k_states=q.new_empty(N, H, M, K),
        v_states=q.new_empty(N, H, M, V),
        k_starts=q.new_empty(NS, H, M, K) if has_starts else None,
        v_starts=q.new_empty(NS, H, M, V) if has_starts else None,
    )
    swished = t.x.new_empty(t.x.shape) if t.x is not None and form.swish else None
    return _filled(*results, *saved._replace(swished=swished, memory=memory).tensors)


def _gsa_bwd(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    saved: list[Tensor | None],
    *arguments: Any,
) -> list[Tensor]:
    """Return the gradients of the given inputs, then those of k0 and v0."""
    from mezzo_gsa.ops.gsa.triton import launches

    t, form = _read(arguments)
    kept = Saved.from_tensors(saved)
    given = [x for x in t.inputs if x is not None]
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in given]
    into = Inputs(*grads) if t.x is None else Inputs(*form.split(grads[0]))
    with torch.cuda.device_of(grads[0]):
        swished = kept.swished
        if t.x is not None and form.swish and swished is None:
            swished = launches.apply_swish(t.x)
        upstream = launches.Upstream(do, dk_last, dv_last)
        first = launches.run_backward(_request(t, form, swished), kept, upstream, into)
    return [*grads, *first]


def _gsa_bwd_fake(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    saved: list[Tensor | None],
    *arguments: Any,
) -> list[Tensor]:
    t, form = _read(arguments)
    _, k, v, g = t.parts(form)
    grads = [x.new_empty(x.shape) for x in t.inputs if x is not None]
    return [*grads, *_fake_memories(k, v, g, t.cu_seqlens)]


def _fake_memories(
    k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return an empty K~ and V~ of each sequence, or their gradients, for tracing."""
    S = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, M = g.shape[2:]
    slots_k, slots_v = (x.new_empty(S, H, M, x.shape[3], dtype=torch.float32) for x in (k, v))
    return slots_k, slots_v


ARGUMENTS = schema_of(Tensors, Form)
NUM_SAVED = len(Saved._fields) - 1 + len(Memory._fields)
"""How many `Saved.tensors` there are."""

gsa = torch.library.custom_op(
    "mezzo_gsa::gsa",
    _registered_gsa,
    mutates_args=(),
    schema=f"({ARGUMENTS}) -> ({', '.join(['Tensor'] * (3 + NUM_SAVED))})",
)
gsa.register_fake(_gsa_fake)
gsa_bwd = torch.library.custom_op(
    "mezzo_gsa::gsa_bwd",
    _gsa_bwd,
    mutates_args=(),
    schema="(Tensor? do, Tensor? dk_last, Tensor? dv_last, Tensor?[] saved, "
    f"{ARGUMENTS}) -> Tensor[]",
)
gsa_bwd.register_fake(_gsa_bwd_fake)
_call_gsa_bwd = undispatched(gsa_bwd, replayed(_gsa_bwd))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor | None, ...]) -> None:
    n = len(Tensors._fields)
    ctx.form = inputs[n:]
    _out, _k_last, _v_last, *saved = output
    ctx.save_for_backward(*inputs[:n], *saved)
    # Often only `out` has a gradient: None costs less than zeros.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, do: Tensor | None, dk_last: Tensor | None, dv_last: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    n, tensors = len(Tensors._fields), ctx.saved_tensors  # read once, for torch's checkpointing
    t, saved = Tensors(*tensors[:n]), [*tensors[n:]]
    *found, dk0, dv0 = _call_gsa_bwd(do, dk_last, dv_last, saved, *t, *ctx.form)
    grads = [None if x is None else found.pop(0) for x in t.inputs]
    first = [None if x is None else dx for dx, x in ((dk0, t.k0), (dv0, t.v0))]
    return *grads, *first, None, *(None,) * len(ctx.form)


differentiable_gsa = register_gradient(gsa, _backward, _save, run=replayed(_gsa), num_results=3)
