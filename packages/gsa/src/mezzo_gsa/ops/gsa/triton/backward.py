"""The backward of gated slot attention on a GPU: the launches of its kernels, in their order.

It goes through the second pass (V~) and then the first (K~). For each it computes the gradients of
the memory at the chunks' borders, then the square (L, L) and the gradients of weights and gates,
then the gradients of the tokens.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_gsa.ops.chunking.by_token import by_token, token_stride
from mezzo_gsa.ops.chunking.triton.states import run_states
from mezzo_gsa.ops.gsa.request import Inputs, Memory, Request, Saved
from mezzo_gsa.ops.gsa.triton.forward import run_memory
from mezzo_gsa.ops.gsa.triton.settings import (
    band_forms,
    channel_tile,
    chunk_settings,
    empty_squares,
    slot_settings,
)
from mezzo_gsa.ops.gsa.triton.slots import slots_bwd_kernel
from mezzo_gsa.ops.gsa.triton.tokens import tokens_kernel


class Upstream(NamedTuple):
    """The gradients of a forward's results; None: zeros."""

    do: Tensor | None
    dk_last: Tensor | None
    dv_last: Tensor | None


def run_backward(
    r: Request, saved: Saved, upstream: Upstream, grads: Inputs
) -> tuple[Tensor, Tensor]:
    """Write the gradients of the inputs into `grads`; return those of the initial K~ and V~.

    If the request has `raw`, the gradients written are those of its parts.
    """
    x, memory = r.x, saved.memory
    (B, T, HQ), H = x.q.shape[:3], x.k.shape[2]
    if memory is None:
        memory, _, _ = run_memory(r, for_backward=True)
    if HQ == H:
        return _run_passes(r, saved, memory, upstream, grads)
    # First compute the gradients of each query head in float32, then sum them over the groups.
    shared = [part for part in (grads.k, grads.v, grads.g, grads.s) if part is not None]
    of_heads = [torch.empty((B, T, HQ, part.shape[3]), device=part.device) for part in shared]
    into = Inputs(grads.q, *of_heads, *(() if grads.s is not None else (None,)))
    first = _run_passes(r, saved, memory, upstream, into)
    for part, heads in zip(shared, of_heads, strict=True):
        part.copy_(heads.unflatten(2, (H, -1)).sum(3))
    dk0, dv0 = (dfirst.unflatten(1, (H, -1)).sum(2) for dfirst in first)
    return dk0, dv0


class Pass(NamedTuple):
    """The tensors of one pass in the backward, where dright = squareᵀ left + write dh."""

    left: Tensor
    right: Tensor
    raw_left: Tensor | None
    raw_right: Tensor | None
    states: Tensor
    starts: Tensor | None
    weights: Tensor
    dlast: Tensor | None
    """The gradient of the final memory."""
    dleft: Tensor | None
    """The output for the gradient of `left`; None in the second pass, where `left` is do."""
    dright: Tensor


def _run_passes(
    r: Request, saved: Saved, memory: Memory, upstream: Upstream, grads: Inputs
) -> tuple[Tensor, Tensor]:
    """Write and return gradients. All except that of q have one entry for each query head."""
    x, raw, chunks = r.x, r.raw, r.chunks
    logits, weights = saved.logits, saved.weights
    assert logits is not None
    assert weights is not None
    _, T, HQ, M = logits.shape
    do = upstream.do
    if do is None:
        do = x.v.new_zeros(()).expand(*x.q.shape[:3], x.v.shape[3])
    dk_last, dv_last = (
        None if dlast is None else dlast.contiguous()
        for dlast in (upstream.dk_last, upstream.dv_last)
    )
    dlogits, part_dg = torch.empty_like(logits), torch.empty_like(logits)
    part_ds = None if grads.s is None else torch.empty_like(logits)
    k_weights = torch.empty_like(weights)
    squares = empty_squares(r)
    settings, of_slots = chunk_settings(r), slot_settings(r)
    grid, N = (chunks.num_chunks * HQ,), chunks.per_row
    raw_q, raw_k, raw_v = (None, None, None) if raw is None else (raw.q, raw.k, raw.v)
    passes = (
        Pass(by_token(do), x.v, None, raw_v, memory.v_states, memory.v_starts, weights, dv_last,
             None, grads.v),
        Pass(x.q, x.k, raw_q, raw_k, memory.k_states, memory.k_starts, k_weights, dk_last,
             grads.q, grads.k),
    )  # fmt: skip
    initial_gradients = []
    for one in passes:
        values, D = one.dleft is None, one.right.shape[3]
        dstates, dstarts, dinitial, dkept = run_states(
            one.left, one.weights, memory.decay, one.dlast, chunks,
            split=chunks.is_split or one.dlast is not None, reverse=True,
        )  # fmt: skip
        initial_gradients.append(dinitial)
        borders = (
            one.states, one.starts, memory.kept, dstates, dstarts, dkept, chunks.chunk_table,
        )  # fmt: skip
        for bands in band_forms(M):
            slots_bwd_kernel[grid](
                one.left, one.right, x.g, memory.running, memory.strength, memory.bands, logits,
                *borders, dlogits, k_weights, part_dg, part_ds, squares, grads.g, grads.s,
                T, N, one.left.stride(1), one.right.stride(1), x.g.stride(1), token_stride(grads.g),
                r.form.scale, **settings, **of_slots, D=D, BD=channel_tile(one.right),
                OWN_STRENGTH=x.s is not None, VALUES=values, BANDS=bands,
            )  # fmt: skip
        tokens_kernel[grid](
            squares, one.left, one.right, memory.write, k_weights, *borders,
            one.raw_left, one.raw_right, one.dleft, one.dright, T, N,
            one.left.stride(1), one.right.stride(1), 0 if raw is None else token_stride(raw.q),
            0 if one.dleft is None else token_stride(one.dleft), token_stride(one.dright),
            **settings, D=D, BD=channel_tile(one.right),
            num_stages=3 if values else 2,  # with both outputs, three stages do not fit
        )  # fmt: skip
    dv0, dk0 = initial_gradients
    return dk0, dv0
