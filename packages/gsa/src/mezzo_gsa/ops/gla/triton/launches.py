"""Gated linear attention on a GPU: the launches of its kernels, in their order.

The forward computes the gates of each chunk, the states at the chunks' borders, the scores inside
the chunks, and the outputs. The backward computes all of these again except the outputs. Then it
computes the gradients of the states at the borders, and the gradients inside the chunks.
"""

from typing import Any, NamedTuple

import torch
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_gsa.ops.chunking.chunks import Chunks
from mezzo_gsa.ops.chunking.triton.states import INNER, precision, run_states
from mezzo_gsa.ops.gla.triton.gate import gate_kernel
from mezzo_gsa.ops.gla.triton.keys import keys_bwd_kernel
from mezzo_gsa.ops.gla.triton.scores import outputs_kernel, scores_bwd_kernel, scores_kernel

CHUNK = 64
"""L, tokens of a chunk."""

MILD = {torch.float32: 16.0, torch.bfloat16: 60.0, torch.float16: 16.0}
"""Decay that one factor may undo: if half a chunk decays by less than exp(-MILD), factors up to
exp(MILD) lose no precision (see `pairs`)."""


class Inputs(NamedTuple):
    """The inputs of a call, or their gradients. Token t of row b is at (b T + t) · stride(1)."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class Parts(NamedTuple):
    """Intermediate results, from which outputs and gradients are computed."""

    running: Tensor
    """(B, T, H, K or 1): running sums G of log gates, from the chunk's start."""
    write: Tensor
    """(B, T, H, K): keys, decayed to the chunk's end."""
    decay: Tensor
    """(chunks, H, K): the share of its first state that each chunk keeps."""
    states: tuple[Tensor, Tensor | None, Tensor]
    """The states at the chunks' borders, as `load_state` reads them."""
    scores: Tensor
    """(B, T, HQ, L): the weight with which each token reads each token of its chunk."""
    weighted: Tensor
    """(B, T, HQ, K): queries, decayed from the chunk's start."""


def run_parts(
    x: Inputs, initial: Tensor | None, scale: float, chunks: Chunks
) -> tuple[Parts, Tensor]:
    """Return the intermediate results, and the final state (S, H, K, V)."""
    (B, T, H, K), KG, HQ = x.k.shape, x.g.shape[3], x.q.shape[2]
    dtype, device = x.k.dtype, x.k.device
    # One precision higher: differences of running sums must be as precise as the results.
    sums = torch.float64 if dtype == torch.float32 else torch.float32
    running = torch.empty((B, T, H, KG), dtype=sums, device=device)
    write = torch.empty((B, T, H, K), dtype=dtype, device=device)
    decay = torch.empty((chunks.num_chunks, H, K), device=device)
    BK = _tile(x.k)
    launch(
        gate_kernel, (chunks.num_chunks * H, ceil_div(K, BK)),
        x.g, x.k, chunks.chunk_table, running, write, decay,
        T, chunks.per_row, x.g.stride(1), x.k.stride(1),
        H=H, K=K, KG=KG, L=chunks.length, BK=BK, SEGMENT=chunks.per_segment, num_warps=4,
    )  # fmt: skip
    if initial is not None:
        initial = initial.contiguous()
    split = chunks.is_split or initial is not None
    states, starts, final, kept = run_states(x.v, write, decay, initial, chunks, split=split)
    scores = torch.empty((B, T, HQ, chunks.length), dtype=dtype, device=device)
    weighted = torch.empty((B, T, HQ, K), dtype=dtype, device=device)
    launch(
        scores_kernel, (chunks.num_chunks * HQ,),
        x.q, x.k, running, chunks.chunk_table, scores, weighted,
        T, chunks.per_row, x.q.stride(1), x.k.stride(1), scale,
        HQ=HQ, H=H, K=K, KG=KG, BK=_pair_tile(x), num_warps=4,
        **_pairs(x, chunks),
    )  # fmt: skip
    return Parts(running, write, decay, (states, starts, kept), scores, weighted), final


def run_outputs(x: Inputs, parts: Parts, chunks: Chunks) -> Tensor:
    """Return o (B, T, HQ, V)."""
    o = torch.empty((*x.q.shape[:3], x.v.shape[3]), dtype=x.q.dtype, device=x.q.device)
    _read(x.v, parts.scores, parts.weighted, parts.states, x.k.shape[2], o, chunks)
    return o


def run_gradients(
    do: Tensor,
    dlast: Tensor | None,
    x: Inputs,
    parts: Parts,
    grads: Inputs,
    scale: float,
    chunks: Chunks,
) -> Tensor:
    """Write the gradients of the inputs into `grads`; return that of the initial state.

    All gradients are those of each query head, (B, T, HQ, ·). The caller sums all but dq over
    groups. If each head has one gate, its gradient has a column for each tile of K; the caller sums
    these too.
    """
    # The two views reset the strides: contiguous() keeps any stride of an axis of length one.
    do = do.contiguous().view(-1).view(do.shape)
    dlast = None if dlast is None else dlast.contiguous()
    HQ, H, T, N = x.q.shape[2], x.k.shape[2], x.q.shape[1], chunks.per_row
    dstates, dstarts, dinitial, dkept = run_states(
        do, parts.weighted, parts.decay, dlast, chunks,
        split=chunks.is_split or dlast is not None, reverse=True,
    )  # fmt: skip
    flow = (dstates, dstarts, dkept)
    _read(do, parts.scores, parts.write, flow, HQ, grads.v, chunks, reverse=True)
    dscores, own = torch.empty_like(parts.scores), do.new_empty(do.shape[:3], dtype=torch.float32)
    sizes = {"HQ": HQ, "H": H, "V": x.v.shape[3], "KG": x.g.shape[3], "BV": _tile(x.v)}
    launch(
        scores_bwd_kernel, (chunks.num_chunks * HQ,),
        do, x.v, parts.running, chunks.chunk_table, dscores, own, T, N, x.v.stride(1), scale,
        L=chunks.length, SEGMENT=chunks.per_segment, PRECISION=precision(do.dtype), num_warps=4,
        **sizes,
    )  # fmt: skip
    BK = _pair_tile(x)
    launch(
        keys_bwd_kernel, (chunks.num_chunks * HQ * ceil_div(x.k.shape[3], BK),),
        do, x.q, x.k, x.v, parts.running, dscores, own, *parts.states, *flow, chunks.chunk_table,
        grads.q, grads.k, grads.g, T, N, x.q.stride(1), x.k.stride(1), x.v.stride(1), scale,
        K=x.k.shape[3], BK=BK, num_warps=8 if do.dtype == torch.float32 else 4, num_stages=2,
        **sizes, **_pairs(x, chunks),
    )  # fmt: skip
    return dinitial


def key_tiles(k: Tensor) -> int:
    """Return how many tiles a key's channels make; each gives a part of the gradient of g."""
    return ceil_div(k.shape[3], _tile(k))


def _read(
    x: Tensor,
    scores: Tensor,
    weights: Tensor,
    states: tuple[Tensor, Tensor | None, Tensor],
    num_state_heads: int,
    y: Tensor,
    chunks: Chunks,
    *,
    reverse: bool = False,
) -> None:
    """Write y (B, T, HQ, V): each token reads its chunk and the state at the chunk's border."""
    HQ, K, V = scores.shape[2], weights.shape[3], x.shape[3]
    BV = _tile(x)
    launch(
        outputs_kernel, (chunks.num_chunks * HQ * ceil_div(V, BV),),
        x, scores, weights, *states, chunks.chunk_table, y,
        x.shape[1], chunks.per_row, x.stride(1),
        HX=x.shape[2], HW=weights.shape[2], HS=num_state_heads, HQ=HQ, K=K, V=V,
        L=chunks.length, BK=_tile(weights), BV=BV, SEGMENT=chunks.per_segment,
        PRECISION=precision(x.dtype), REVERSE=reverse, num_warps=4, num_stages=2,
    )  # fmt: skip


def _pair_tile(x: Inputs) -> int:
    """Return how many channels of q and k are on chip at a time, with the factors of their pairs.

    With a gate for each channel the factors take registers, in float32 twice as many.
    """
    if x.g.shape[3] == 1:
        return _tile(x.k)
    return min(_tile(x.k), 32 if x.k.dtype == torch.bfloat16 else 16)


def _pairs(x: Inputs, chunks: Chunks) -> dict[str, Any]:
    return {
        "L": chunks.length,
        "SEGMENT": chunks.per_segment,
        "LEVELS": chunks.length.bit_length() - 2,  # how often half a chunk can be halved
        "MILD": MILD[x.q.dtype],
        "INNER": INNER[x.q.dtype],
        "PRECISION": precision(x.q.dtype),
    }


def _tile(x: Tensor) -> int:
    """Return how many channels of a head are on chip at a time; products need at least 16."""
    widest = 32 if x.dtype == torch.float32 else 64
    return min(widest, max(16, next_power_of_2(x.shape[3])))
