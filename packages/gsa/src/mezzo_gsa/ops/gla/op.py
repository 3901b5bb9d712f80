"""The registered ops of gated linear attention's kernels: schemas, fakes and gradients."""

from typing import Any

import torch
from mezzo_core.ops.gradients import function_of, register_gradient, undispatched
from mezzo_core.ops.packed import check_borders
from mezzo_core.ops.replay import replayed
from torch import Tensor

from mezzo_gsa.ops.chunking.by_token import by_token
from mezzo_gsa.ops.chunking.chunks import Chunks, place_chunks


@torch.library.custom_op("mezzo_gsa::gla", mutates_args=())
def gla(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return out (B, T, HQ, V) and the final state (S, H, K, V); see `chunk_gla`."""
    from mezzo_gsa.ops.gla.triton import launches

    x = launches.Inputs(*(by_token(part) for part in (q, k, v, g)))
    chunks = _place(q, cu_seqlens)
    with torch.cuda.device_of(q):
        parts, final = launches.run_parts(x, initial_state, scale, chunks)
        return launches.run_outputs(x, parts, chunks), final


@gla.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    _g, _initial_state, cu_seqlens, _scale = rest
    return q.new_empty(*q.shape[:3], v.shape[3]), _fake_state(k, v, cu_seqlens)


@torch.library.custom_op("mezzo_gsa::gla_bwd", mutates_args=())
def gla_bwd(
    dout: Tensor,
    dfinal: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    initial_state: Tensor | None,
    cu_seqlens: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v, g and the initial state."""
    from mezzo_gsa.ops.gla.triton import launches

    x = launches.Inputs(*(by_token(part) for part in (q, k, v, g)))
    (B, T, HQ, _), H = q.shape, k.shape[2]
    chunks = _place(q, cu_seqlens)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    # Each query head has its own gradients, in float32 if those of a group have to be summed.
    dtype = torch.float32 if HQ > H else q.dtype
    dk, dv = (torch.empty((B, T, HQ, y.shape[3]), dtype=dtype, device=q.device) for y in (k, v))
    columns = g.shape[3] if g.shape[3] > 1 else launches.key_tiles(k)
    dg = torch.empty((B, T, HQ, columns), device=q.device)
    with torch.cuda.device_of(q):
        parts, _ = launches.run_parts(x, initial_state, scale, chunks)
        grads = launches.Inputs(dq, dk, dv, dg)
        dinitial = launches.run_gradients(dout, dfinal, x, parts, grads, scale, chunks)
    if g.shape[3] == 1 and columns > 1:
        dg = dg.sum(3, keepdim=True)
    if HQ > H:
        dk, dv, dg = (y.unflatten(2, (H, -1)).sum(3) for y in (dk, dv, dg))
        dinitial = dinitial.unflatten(1, (H, -1)).sum(2)
    return dq, dk.to(k.dtype), dv.to(v.dtype), dg, dinitial


@gla_bwd.register_fake
def _(
    dout: Tensor, dfinal: Tensor | None, q: Tensor, k: Tensor, v: Tensor, g: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    _initial_state, cu_seqlens, _scale = rest
    dq, dk, dv, dg = (x.new_empty(x.shape) for x in (q, k, v, g))
    return dq, dk, dv, dg, _fake_state(k, v, cu_seqlens)


_call_gla_bwd = undispatched(gla_bwd, replayed(function_of(gla_bwd)))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors)
    # Often only `out` has a gradient: None costs less than zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dout: Tensor | None, dfinal: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, g, initial_state, cu_seqlens = ctx.saved_tensors
    if dout is None:
        dout = v.new_zeros(()).expand(*q.shape[:3], v.shape[3])
    *grads, dinitial = _call_gla_bwd(dout, dfinal, q, k, v, g, initial_state, cu_seqlens, ctx.scale)
    return (*grads, None if initial_state is None else dinitial, None, None)


differentiable_gla = register_gradient(gla, _backward, _save, run=replayed(function_of(gla)))


def _place(q: Tensor, cu_seqlens: Tensor | None) -> Chunks:
    from mezzo_gsa.ops.gla.triton.launches import CHUNK

    # torch.compile does not trace an op, so the CPU can read the values here.
    if cu_seqlens is not None:
        check_borders("chunk_gla", cu_seqlens, q.shape[1])
    return place_chunks(q.shape[0], q.shape[1], CHUNK, cu_seqlens)


def _fake_state(k: Tensor, v: Tensor, cu_seqlens: Tensor | None) -> Tensor:
    S = k.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return k.new_empty(S, *k.shape[2:], v.shape[3], dtype=torch.float32)
