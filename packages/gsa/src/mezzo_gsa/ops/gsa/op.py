"""The registered ops of gated slot attention's kernels: schemas, fakes and gradients.

`gsa` takes separate tensors. `gsa_projected` takes a projection with q, k, v and the gates' logits
side by side. It reads the projection in place and gives it one gradient, so nothing is split or
concatenated.
"""

from typing import Any

import torch
from mezzo_core.ops.gradients import register_gradient
from mezzo_core.ops.packed import check_borders
from torch import Tensor

from mezzo_gsa.ops.chunking.chunks import place_chunks
from mezzo_gsa.ops.gsa.form import FORM_SCHEMA, Form
from mezzo_gsa.ops.gsa.projection import PROJECTION_SCHEMA, Parts, Projection
from mezzo_gsa.ops.gsa.request import NUM_SAVED, Inputs, Memory, Request, Saved, make_request
from mezzo_gsa.ops.gsa.tiling import chunk_length, gate_tiles

INPUTS = "Tensor q, Tensor k, Tensor v, Tensor g, Tensor? s"
FIRST = "Tensor? k0, Tensor? v0, Tensor? cu_seqlens"
UPSTREAM = "Tensor? do, Tensor? dk_last, Tensor? dv_last"


def tensors(count: int) -> str:
    """Return the type of a tuple of `count` tensors, as a schema declares it."""
    return f"({', '.join(['Tensor'] * count)})"


RESULTS = tensors(3 + NUM_SAVED)
"""Results of a forward: out, the last K~ and V~, and the tensors of `Saved.as_tensors`."""


def _gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    *form: Any,
) -> tuple[Tensor, ...]:
    """Run the forward; see `chunk_gsa` for the tensors."""
    from mezzo_gsa.ops.gsa.triton import forward

    _check_borders(cu_seqlens, q)
    with torch.cuda.device_of(q):
        request = make_request(Parts(q, k, v, g), s, k0, v0, cu_seqlens, Form(*form))
        results = forward.run_forward(request)
    return results.out, results.k_last, results.v_last, *results.saved.as_tensors(q)


def _gsa_fake(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    *form: Any,
) -> tuple[Tensor, ...]:
    *results, saved = _fake_forward(Parts(q, k, v, g), k0, cu_seqlens, Form(*form))
    return *results, *saved.as_tensors(q)


def _gsa_bwd(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    *form: Any,
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, g, s (empty if s is None), k0 and v0."""
    from mezzo_gsa.ops.gsa.triton import backward

    parts = Parts(q, k, v, g)
    dq, dk, dv, dg = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parts)
    ds = None if s is None else torch.empty(s.shape, device=s.device)
    with torch.cuda.device_of(q):
        request = make_request(parts, s, k0, v0, cu_seqlens, Form(*form))
        upstream = backward.Upstream(do, dk_last, dv_last)
        dk0, dv0 = backward.run_backward(
            request, Saved.from_tensors(saved), upstream, Inputs(dq, dk, dv, dg, ds)
        )
    return dq, dk, dv, dg, g.new_empty(0) if ds is None else ds, dk0, dv0


def _gsa_bwd_fake(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    ds = g.new_empty(0 if s is None else s.shape, dtype=torch.float32)
    dq, dk, dv, dg = (x.new_empty(x.shape) for x in (q, k, v, g))
    return dq, dk, dv, dg, ds, *_fake_memories(k, v, g, cu_seqlens)


gsa = torch.library.custom_op(
    "mezzo_gsa::gsa",
    _gsa,
    mutates_args=(),
    schema=f"({INPUTS}, {FIRST}, {FORM_SCHEMA}) -> {RESULTS}",
)
gsa.register_fake(_gsa_fake)
gsa_bwd = torch.library.custom_op(
    "mezzo_gsa::gsa_bwd",
    _gsa_bwd,
    mutates_args=(),
    schema=f"({UPSTREAM}, {INPUTS}, {FIRST}, Tensor[] saved, {FORM_SCHEMA}) -> {tensors(7)}",
)
gsa_bwd.register_fake(_gsa_bwd_fake)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    q, k, v, g, s, k0, v0, cu_seqlens, *ctx.form = inputs
    _out, _k_last, _v_last, *saved = output
    ctx.save_for_backward(q, k, v, g, s, k0, v0, cu_seqlens, *saved)
    # Often only `out` has a gradient. A missing gradient arrives as None, and no tensor of zeros
    # is made for it.
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, do: Tensor | None, dk_last: Tensor | None, dv_last: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    q, k, v, g, s, k0, v0, cu_seqlens, *saved = ctx.saved_tensors
    dq, dk, dv, dg, ds, dk0, dv0 = gsa_bwd(
        do, dk_last, dv_last, q, k, v, g, s, k0, v0, cu_seqlens, saved, *ctx.form
    )
    ds, dk0, dv0 = _wanted((ds, s), (dk0, k0), (dv0, v0))
    return dq, dk, dv, dg, ds, dk0, dv0, None, *(None,) * len(ctx.form)


differentiable_gsa = register_gradient(gsa, _backward, _save)


def _projected(
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    *form_fields: Any,
) -> tuple[Tensor, ...]:
    """Run the forward on a projection; see `chunk_gsa_projected`."""
    from mezzo_gsa.ops.gsa.triton import forward

    x, form = x.contiguous(), Form(*form_fields)
    projection = Projection(num_heads, num_kv_heads, num_slots)
    _check_borders(cu_seqlens, x)
    with torch.cuda.device_of(x):
        y = forward.apply_swish(x) if form.swish else x
        request = _projected_request(projection, x, y, k0, v0, cu_seqlens, form)
        results = forward.run_forward(request)
    saved = results.saved
    if form.swish and form.keep == "states":
        saved = saved._replace(swished=y)
    return results.out, results.k_last, results.v_last, *saved.as_tensors(x)


def _projected_fake(
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    *form_fields: Any,
) -> tuple[Tensor, ...]:
    form, parts = Form(*form_fields), Projection(num_heads, num_kv_heads, num_slots).split(x)
    *results, saved = _fake_forward(parts, k0, cu_seqlens, form)
    if form.swish and form.keep == "states":
        saved = saved._replace(swished=x.new_empty(x.shape))
    return *results, *saved.as_tensors(x)


def _projected_bwd(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    *form_fields: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, in one tensor, and of k0 and v0."""
    from mezzo_gsa.ops.gsa.triton import backward, forward

    x, dx = x.contiguous(), torch.empty(x.shape, dtype=x.dtype, device=x.device)
    projection = Projection(num_heads, num_kv_heads, num_slots)
    form, kept = Form(*form_fields), Saved.from_tensors(saved)
    with torch.cuda.device_of(x):
        y = x if kept.swished is None else kept.swished
        if form.swish and kept.swished is None:
            y = forward.apply_swish(x)
        request = _projected_request(projection, x, y, k0, v0, cu_seqlens, form)
        upstream = backward.Upstream(do, dk_last, dv_last)
        grads = Inputs(*projection.split(dx), s=None)
        dk0, dv0 = backward.run_backward(request, kept, upstream, grads)
    return dx, dk0, dv0


def _projected_bwd_fake(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    x: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    saved: list[Tensor],
    num_heads: int,
    num_kv_heads: int,
    num_slots: int,
    *rest: Any,
) -> tuple[Tensor, ...]:
    _, k, v, g = Projection(num_heads, num_kv_heads, num_slots).split(x)
    return x.new_empty(x.shape), *_fake_memories(k, v, g, cu_seqlens)


def _projected_request(
    projection: Projection,
    x: Tensor,
    y: Tensor,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    form: Form,
) -> Request:
    """Return the request of a projection x; y is x after swish, or x itself without swish."""
    raw = projection.split(x)
    parts = projection.split(y)._replace(g=raw.g) if form.swish else raw
    return make_request(parts, None, k0, v0, cu_seqlens, form, raw if form.swish else None)


gsa_projected = torch.library.custom_op(
    "mezzo_gsa::gsa_projected",
    _projected,
    mutates_args=(),
    schema=f"(Tensor x, {FIRST}, {PROJECTION_SCHEMA}, {FORM_SCHEMA}) -> {RESULTS}",
)
gsa_projected.register_fake(_projected_fake)
gsa_projected_bwd = torch.library.custom_op(
    "mezzo_gsa::gsa_projected_bwd",
    _projected_bwd,
    mutates_args=(),
    schema=f"({UPSTREAM}, Tensor x, {FIRST}, Tensor[] saved, {PROJECTION_SCHEMA}, {FORM_SCHEMA}) "
    f"-> {tensors(3)}",
)
gsa_projected_bwd.register_fake(_projected_bwd_fake)


def _save_projected(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, k0, v0, cu_seqlens, *ctx.form = inputs
    _out, _k_last, _v_last, *saved = output
    ctx.save_for_backward(x, k0, v0, cu_seqlens, *saved)
    ctx.set_materialize_grads(False)  # as in `_save`


def _backward_projected(
    ctx: Any, do: Tensor | None, dk_last: Tensor | None, dv_last: Tensor | None, *unused: None
) -> tuple[Tensor | None, ...]:
    x, k0, v0, cu_seqlens, *saved = ctx.saved_tensors
    dx, dk0, dv0 = gsa_projected_bwd(do, dk_last, dv_last, x, k0, v0, cu_seqlens, saved, *ctx.form)
    dk0, dv0 = _wanted((dk0, k0), (dv0, v0))
    return dx, dk0, dv0, None, *(None,) * len(ctx.form)


differentiable_gsa_projected = register_gradient(
    gsa_projected, _backward_projected, _save_projected
)


def _check_borders(cu_seqlens: Tensor | None, x: Tensor) -> None:
    # torch.compile does not trace an op, so the CPU can read the values here.
    if cu_seqlens is not None:
        check_borders("chunk_gsa", cu_seqlens, x.shape[1])


def _wanted(*pairs: tuple[Tensor, Tensor | None]) -> list[Tensor | None]:
    """Return the gradient of each (gradient, input) pair, or None if the input is None."""
    return [None if x is None else dx for dx, x in pairs]


def _fake_forward(
    parts: Parts, k0: Tensor | None, cu_seqlens: Tensor | None, form: Form
) -> tuple[Tensor, Tensor, Tensor, Saved]:
    """Return empty results of the right shapes, for tracing."""
    q, k, v, g = parts
    (B, T, HQ, K), (H, V, M) = q.shape, (*v.shape[2:], g.shape[3])
    fp32, dtype = torch.float32, q.dtype
    results = (q.new_empty(B, T, HQ, V), *_fake_memories(k, v, g, cu_seqlens))
    if form.keep == "nothing":
        return *results, Saved()
    saved = Saved(q.new_empty(B, T, HQ, M, dtype=fp32), q.new_empty(B, T, HQ, M))
    if form.keep == "weights":
        return *results, saved
    chunks = place_chunks(B, T, chunk_length(dtype, M), cu_seqlens)
    N, NS = chunks.num_chunks, chunks.num_segments
    has_starts = chunks.is_split or k0 is not None
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
    return *results, saved._replace(memory=memory)


def _fake_memories(
    k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return an empty K~ and V~ of each sequence, or their gradients, for tracing."""
    S = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, M = g.shape[2:]
    slots_k, slots_v = (x.new_empty(S, H, M, x.shape[3], dtype=torch.float32) for x in (k, v))
    return slots_k, slots_v
