"""Gated slot attention on a GPU: the launches of its kernels, in their order, and their constants.

The forward computes the gates of each chunk, then the two memories at the chunks' borders, which
depend only on k, v and the gates. Then it computes the slots' weights and from them the square
(L, L) of weights between the tokens of a chunk, and last the outputs.

The backward goes through the second pass (V~) and then the first (K~). For each it computes the
gradients of the memory at the chunks' borders, then the square (L, L) and the gradients of weights
and gates, then the gradients of the tokens.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from mezzo_core.ops.launch import launch
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor
from triton.runtime.errors import OutOfResources

from mezzo_gsa.ops.chunking.by_token import by_token, token_stride
from mezzo_gsa.ops.chunking.triton.states import INNER, padded, precision, run_states
from mezzo_gsa.ops.gsa.request import Inputs, Memory, Request, Saved, gate_tiles
from mezzo_gsa.ops.gsa.triton.gate import gate_kernel
from mezzo_gsa.ops.gsa.triton.slots import slots_bwd_kernel, slots_fwd_kernel
from mezzo_gsa.ops.gsa.triton.tokens import swish_kernel, tokens_kernel

BAND = {torch.float32: 40.0, torch.bfloat16: 120.0, torch.float16: 40.0}
"""Width of a band of running sums. Factors up to exp(BAND / 2) lose no digits."""


class Results(NamedTuple):
    """The results of the forward."""

    out: Tensor
    k_last: Tensor
    v_last: Tensor
    saved: Saved


def run_forward(r: Request) -> Results:
    """Return out (B, T, HQ, V), the last memories, and the saved tensors as `Form.keep` says."""
    keeps_states = r.form.keep == "states"
    memory, k_last, v_last = run_memory(r, for_backward=keeps_states)
    out, saved = _run_slots(r, memory)
    if keeps_states:
        saved = saved._replace(memory=memory)
    return Results(out, k_last, v_last, saved)


def run_memory(r: Request, *, for_backward: bool) -> tuple[Memory, Tensor, Tensor]:
    """Return the memories at the chunks' borders, and the final K~ and V~ (S, H, M, ·)."""
    x, chunks = r.x, r.chunks
    (B, T, H, M), dtype, device = x.g.shape, x.k.dtype, x.k.device
    # One precision higher: differences of running sums must be as precise as the results.
    sums = torch.float64 if dtype == torch.float32 else torch.float32
    running = torch.empty((B, T, H, M), dtype=sums, device=device)
    write = torch.empty_like(running, dtype=dtype)
    # Float32: in 16 bits the slots' strengths would have different errors, which a softmax
    # magnifies.
    strength = torch.empty_like(running, dtype=torch.float32) if for_backward else None
    decay = torch.empty((chunks.num_chunks, H, M), device=device)
    tiles = gate_tiles(M)
    bands = torch.empty((chunks.num_chunks, H, tiles), dtype=torch.int32, device=device)
    launch(
        gate_kernel, (chunks.num_chunks * H, tiles),
        x.g, x.s, chunks.chunk_table, running, strength, write, decay, bands,
        T, chunks.per_row, x.g.stride(1),
        H=H, M=M, BM=padded(M) // tiles, L=chunks.length, SEGMENT=chunks.per_segment,
        DAMPING=r.form.damping, WIDTH=BAND[dtype], num_warps=8,
    )  # fmt: skip
    k0, v0 = (None if first is None else first.contiguous() for first in (r.k0, r.v0))
    split = chunks.is_split or k0 is not None
    k_states, k_starts, k_last, kept = run_states(x.k, write, decay, k0, chunks, split=split)
    v_states, v_starts, v_last, _ = run_states(x.v, write, decay, v0, chunks, split=split)
    memory = Memory(
        running, strength, write, decay, bands, kept, k_states, v_states, k_starts, v_starts
    )
    return memory, k_last, v_last


def _run_slots(r: Request, memory: Memory) -> tuple[Tensor, Saved]:
    """Return out (B, T, HQ, V), and the slots' weights if there will be a backward."""
    x, chunks = r.x, r.chunks
    (B, T, HQ), (M, V) = x.q.shape[:3], (x.g.shape[3], x.v.shape[3])
    out = torch.empty((B, T, HQ, V), dtype=x.q.dtype, device=x.q.device)
    weights = torch.empty((B, T, HQ, M), dtype=x.q.dtype, device=x.q.device)
    logits = None
    if r.form.keep != "nothing":
        logits = torch.empty_like(weights, dtype=torch.float32)
    squares = empty_squares(r)
    grid, N = (chunks.num_chunks * HQ,), chunks.per_row
    settings, of_slots = chunk_settings(r), slot_settings(r)
    for bands in band_forms(M):
        launch(
            slots_fwd_kernel, grid,
            x.q, x.k, x.g, x.s, memory.running, memory.bands, memory.k_states,
            memory.k_starts, memory.kept, chunks.chunk_table, squares, logits, weights,
            T, N, x.q.stride(1), x.k.stride(1), x.g.stride(1), r.form.scale,
            **settings, **of_slots, K=x.k.shape[3], BK=channel_tile(x.k), BANDS=bands,
        )  # fmt: skip
    launch(
        tokens_kernel, grid,
        squares, None, x.v, None, weights, memory.v_states, memory.v_starts, memory.kept,
        None, None, None, chunks.chunk_table, None, None, out, None,
        T, N, 0, x.v.stride(1), 0, out.stride(1), 0, **settings, D=V, BD=channel_tile(x.v),
        num_stages=3,
    )  # fmt: skip
    return out, Saved() if logits is None else Saved(logits, weights)


def apply_swish(x: Tensor) -> Tensor:
    """Return swish of a whole contiguous projection; nobody reads the part of the gate's logits."""
    y = torch.empty_like(x)
    launch(swish_kernel, (ceil_div(x.numel(), 4096),), x, y, x.numel(), BLOCK=4096, num_warps=4)
    return y


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
    """Write and return gradients: except q's, they have one entry for each query head."""
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
            launch(
                slots_bwd_kernel, grid,
                one.left, one.right, x.g, memory.running, memory.strength, memory.bands, logits,
                *borders, dlogits, k_weights, part_dg, part_ds, squares, grads.g, grads.s,
                T, N, one.left.stride(1), one.right.stride(1), x.g.stride(1), token_stride(grads.g),
                r.form.scale, **settings, **of_slots, D=D, BD=channel_tile(one.right),
                OWN_STRENGTH=x.s is not None, VALUES=values, BANDS=bands,
            )  # fmt: skip
        inputs = memory.write, k_weights, *borders
        tokens = partial(_launch_tokens, grid, one, squares, inputs, (T, N), settings)
        try:
            tokens(one.dleft, one.dright)
        except OutOfResources:  # on GPUs with less shared memory, one gradient after the other
            if one.dleft is None:
                raise
            tokens(one.dleft, None)
            tokens(None, one.dright)
    dv0, dk0 = initial_gradients
    return dk0, dv0


def _launch_tokens(
    grid: tuple[int, ...],
    one: Pass,
    squares: Tensor,
    inputs: tuple[Tensor | None, ...],
    sizes: tuple[int, int],
    settings: dict[str, Any],
    left: Tensor | None,
    right: Tensor | None,
) -> None:
    """Write the gradients of tokens that are given; `inputs` are from `write` to `chunk_table`."""
    raw = one.raw_right
    launch(
        tokens_kernel, grid,
        squares, one.left, one.right, *inputs, one.raw_left, one.raw_right, left, right, *sizes,
        one.left.stride(1), one.right.stride(1), 0 if raw is None else token_stride(raw),
        *(0 if x is None else token_stride(x) for x in (left, right)),
        **settings, D=one.right.shape[3], BD=channel_tile(one.right),
        num_stages=3 if left is None else 2,  # with both outputs, three stages do not fit
    )  # fmt: skip


def chunk_settings(r: Request) -> dict[str, Any]:
    """Return the sizes and the precision of kernels whose programs own a chunk and a head."""
    L, M = r.chunks.length, r.x.g.shape[3]
    return {
        "HQ": r.x.q.shape[2],
        "H": r.x.k.shape[2],
        "M": M,
        "L": L,
        "BM": padded(M),
        "SEGMENT": r.chunks.per_segment,
        "PRECISION": precision(r.x.q.dtype),
        "num_warps": 4 if L < 128 and M <= 64 else 8,
    }


def slot_settings(r: Request) -> dict[str, Any]:
    """Return further constants for the kernels in `slots.py`, which also use `chunk_settings`."""
    dtype = r.x.q.dtype
    return {
        "WIDTH": BAND[dtype],
        "INNER": INNER[dtype],
        "M_TILES": gate_tiles(r.x.g.shape[3]),
        "BETWEEN": r.form.between,
        "DAMPING": r.form.damping,
        "num_stages": 3,
    }


def band_forms(num_slots: int) -> tuple[str, ...]:
    """Return the forms of a kernel that share the chunks; with 128 slots one form is faster."""
    return ("one", "more") if num_slots <= 64 else ("any",)


def empty_squares(r: Request) -> Tensor:
    """Return an empty tensor for the weights between tokens, (chunks · HQ, L, L), type INNER."""
    q, L = r.x.q, r.chunks.length
    shape = (r.chunks.num_chunks * q.shape[2], L, L)
    return q.new_empty(shape, dtype=torch.float32 if q.dtype == torch.float16 else q.dtype)


def channel_tile(x: Tensor) -> int:
    """Return how many channels of a head are on chip at a time."""
    return min(32 if x.dtype == torch.float32 else 64, padded(x.shape[3]))
