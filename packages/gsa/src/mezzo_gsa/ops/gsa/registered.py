"""The kernels as an op that PyTorch knows: shapes for tracing, and gradients."""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.packed import check_borders
from torch import Tensor

from mezzo_gsa.ops.chunking.by_token import by_token
from mezzo_gsa.ops.chunking.chunks import place_chunks
from mezzo_gsa.ops.gsa.tiling import chunk_length, gate_tiles


class Results(NamedTuple):
    """What the forward returns; all from `logits` on is for the backward (missing ones empty)."""

    out: Tensor
    k_last: Tensor
    v_last: Tensor
    logits: Tensor
    weights: Tensor
    running: Tensor
    strength: Tensor
    write: Tensor
    decay: Tensor
    bands: Tensor
    kept: Tensor
    k_states: Tensor
    v_states: Tensor
    k_starts: Tensor
    v_starts: Tensor
    swished: Tensor
    """`gsa_projected`: q, k, v behind their swish."""


Flat = tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
    Tensor, Tensor, Tensor, Tensor,
]  # fmt: skip


Parts = tuple[Tensor, Tensor, Tensor, Tensor]


def unpack(x: Tensor, num_heads: int, num_kv_heads: int, num_slots: int) -> Parts:
    """Return q (B, T, HQ, D), k, v (B, T, H, D), g (B, T, H, M), as parts of (B, T, W)."""
    slots = num_kv_heads * num_slots
    D = (x.shape[2] - slots) // (num_heads + 2 * num_kv_heads)
    widths = [num_heads * D, num_kv_heads * D, num_kv_heads * D, slots]
    q, k, v, g = x.split(widths, dim=2)
    return (*(part.unflatten(2, (-1, D)) for part in (q, k, v)), g.unflatten(2, (-1, num_slots)))


def run_forward(
    parts: Parts,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    form: tuple[Any, ...],
    keep_states: bool,
    differentiable: bool,
) -> Flat:
    """Run the kernels of the forward; keep what the backward needs where it is wanted."""
    from mezzo_gsa.ops.gsa.triton import launches

    if cu_seqlens is not None:  # here torch.compile does not trace, and a CPU can look
        check_borders("chunk_gsa", cu_seqlens, parts[0].shape[1])
    x = _inputs(parts, s)
    B, T = x.q.shape[:2]
    chunks = place_chunks(B, T, chunk_length(x.q.dtype, x.g.shape[3]), cu_seqlens)
    with torch.cuda.device_of(x.q):
        first = _contiguous(k0), _contiguous(v0)
        keep_states = keep_states and differentiable
        memory, *last = launches.run_memory(
            x, *first, launches.Form(*form), chunks, for_backward=keep_states
        )
        o, *made = launches.slots_fwd(
            x, memory, launches.Form(*form), chunks, differentiable=differentiable
        )
    kept = memory if keep_states else (None,) * len(memory)
    # No two results may be one tensor, not even an empty one.
    swished = x.q.new_empty(0)
    made = [x.q.new_empty(0) if m is None else m for m in (*made, *kept)]
    return Results._make((o, *last, *made, swished))


def fake_forward(
    parts: Parts,
    k0: Tensor | None,
    cu_seqlens: Tensor | None,
    keep_states: bool,
    differentiable: bool,
) -> Flat:
    """Return results of the right shapes, for tracing."""
    q, _, v, g = parts
    (B, T, HQ, K), (H, V, M) = q.shape, (*v.shape[2:], g.shape[3])
    length = chunk_length(q.dtype, M)
    chunks = place_chunks(B, T, length, cu_seqlens)
    N, NS, S = chunks.num_chunks, chunks.num_segments, chunks.num_sequences
    fp32, dtype = torch.float32, q.dtype
    sums = torch.float64 if dtype == fp32 else fp32
    states = keep_states and differentiable
    starts = states and (chunks.is_split or k0 is not None)
    return Results(
        q.new_empty(B, T, HQ, V),
        q.new_empty(S, H, M, K, dtype=fp32),
        q.new_empty(S, H, M, V, dtype=fp32),
        q.new_empty(B, T, HQ, M, dtype=fp32) if differentiable else q.new_empty(0),
        q.new_empty(B, T, HQ, M) if differentiable else q.new_empty(0),
        q.new_empty(B, T, H, M, dtype=sums) if states else q.new_empty(0),
        q.new_empty(B, T, H, M, dtype=fp32) if states else q.new_empty(0),
        q.new_empty(B, T, H, M) if states else q.new_empty(0),
        q.new_empty(N, H, M, dtype=fp32) if states else q.new_empty(0),
        q.new_empty(N, H, gate_tiles(M), dtype=torch.int32) if states else q.new_empty(0),
        q.new_empty(N, H, M, dtype=fp32) if states else q.new_empty(0),
        q.new_empty(N, H, M, K) if states else q.new_empty(0),
        q.new_empty(N, H, M, V) if states else q.new_empty(0),
        q.new_empty(NS, H, M, K) if starts else q.new_empty(0),
        q.new_empty(NS, H, M, V) if starts else q.new_empty(0),
        q.new_empty(0),
    )


def run_backward(
    do: Tensor | None,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    parts: Parts,
    raw: Parts | None,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    kept: list[Tensor],
    grads: Parts,
    ds: Tensor | None,
    form: tuple[Any, ...],
) -> tuple[Tensor, Tensor]:
    """Write the gradients of q, k, v, g into `grads`; return those of the first memories."""
    from mezzo_gsa.ops.gsa.triton import launches

    x = _inputs(parts, s)
    (B, T, HQ), (H, V) = x.q.shape[:3], x.v.shape[2:]
    if do is None:
        do = x.v.new_zeros(()).expand(B, T, HQ, V)
    chunks = place_chunks(B, T, chunk_length(x.q.dtype, x.g.shape[3]), cu_seqlens)
    logits, weights, *kept, _ = kept
    grouped = HQ > H
    dq, dk, dv, dg = grads
    if grouped:  # a gradient for each query head first, in float32, where they will be summed
        dk, dv, dg = (
            torch.empty((B, T, HQ, part.shape[3]), device=part.device) for part in grads[1:]
        )
    ds_heads = torch.empty_like(logits) if grouped and ds is not None else ds
    with torch.cuda.device_of(x.q):
        if kept[0].numel():
            *needed, k_starts, v_starts = kept
            starts = [m if m.numel() else None for m in (k_starts, v_starts)]
            memory = launches.Memory(*needed, *starts)
        else:
            first = _contiguous(k0), _contiguous(v0)
            memory, _, _ = launches.run_memory(
                x, *first, launches.Form(*form), chunks, for_backward=True
            )
        last = _contiguous(dk_last), _contiguous(dv_last)
        dk0, dv0 = launches.gsa_bwd(
            by_token(do), *last, x, None if raw is None else launches.Inputs(*raw, None), memory,
            logits, weights, launches.Inputs(dq, dk, dv, dg, ds_heads), launches.Form(*form),
            chunks,
        )  # fmt: skip
    if grouped:
        pairs = [*zip(grads[1:], (dk, dv, dg), strict=True)]
        if ds is not None and ds_heads is not None:
            pairs.append((ds, ds_heads))
        for grad, heads in pairs:
            grad.copy_(heads.unflatten(2, (H, -1)).sum(3))
        dk0, dv0 = (x.unflatten(1, (H, -1)).sum(2) for x in (dk0, dv0))
    return dk0, dv0


def _inputs(parts: Parts, s: Tensor | None) -> Any:
    from mezzo_gsa.ops.gsa.triton import launches

    q, k, v, g = (by_token(part) for part in parts)
    return launches.Inputs(q, k, v, g, _contiguous(s))


def _contiguous(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


@torch.library.custom_op("mezzo_gsa::gsa", mutates_args=())
def gsa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    between: str,
    keep_states: bool,
    differentiable: bool,
) -> Flat:
    """Run the forward; see `chunk_gsa` for the tensors."""
    form = (scale, between, None)
    return run_forward((q, k, v, g), s, k0, v0, cu_seqlens, form, keep_states, differentiable)


@gsa.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    s: Tensor | None,
    k0: Tensor | None,
    v0: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
    between: str,
    keep_states: bool,
    differentiable: bool,
) -> Flat:
    return fake_forward((q, k, v, g), k0, cu_seqlens, keep_states, differentiable)


@torch.library.custom_op("mezzo_gsa::gsa_bwd", mutates_args=())
def gsa_bwd(
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
    kept: list[Tensor],
    scale: float,
    between: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the backward."""
    parts = q, k, v, g
    dq, dk, dv, dg = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in parts)
    ds = None if s is None else torch.empty(s.shape, device=s.device)
    first = run_backward(
        do, dk_last, dv_last, parts, None, s, k0, v0, cu_seqlens, kept, (dq, dk, dv, dg),
        ds, (scale, between, None),
    )  # fmt: skip
    return dq, dk, dv, dg, g.new_empty(0) if ds is None else ds, *first


@gsa_bwd.register_fake
def _(
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
    *_: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    ds = g.new_empty(0 if s is None else s.shape, dtype=torch.float32)
    dq, dk, dv, dg = (x.new_empty(x.shape) for x in (q, k, v, g))
    return dq, dk, dv, dg, ds, *fake_first(k, v, g, cu_seqlens)


def fake_first(k: Tensor, v: Tensor, g: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return gradients of the first memories, for tracing."""
    S = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    H, M = g.shape[2:]
    first, second = (x.new_empty(S, H, M, x.shape[3], dtype=torch.float32) for x in (k, v))
    return first, second


def _save(ctx: Any, inputs: tuple[Any, ...], output: Flat) -> None:
    *tensors, ctx.scale, ctx.between, _, _ = inputs
    ctx.save_for_backward(*tensors, *output[3:])
    # Nobody pulls on what is kept, and few on the final state: a missing gradient stays missing.
    ctx.set_materialize_grads(False)


def _gsa_backward(
    ctx: Any, do: Tensor | None, dk_last: Tensor | None, dv_last: Tensor | None, *_: Any
) -> tuple[Tensor | None, ...]:
    q, k, v, g, s, k0, v0, cu_seqlens, *kept = ctx.saved_tensors
    dq, dk, dv, dg, ds, dk0, dv0 = gsa_bwd(
        do, dk_last, dv_last, q, k, v, g, s, k0, v0, cu_seqlens, kept, ctx.scale, ctx.between
    )
    first = (None if k0 is None else dk0, None if v0 is None else dv0)
    return (dq, dk, dv, dg, None if s is None else ds, *first, *(None,) * 5)


gsa.register_autograd(_gsa_backward, setup_context=_save)
