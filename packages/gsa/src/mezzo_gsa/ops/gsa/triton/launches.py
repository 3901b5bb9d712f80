"""Gated slot attention on a GPU: which kernels run, in which order, on which buffers.

Forward: the gates of each chunk; the two memories at the chunks' borders, which depend on k, v and
g only; the slots' weights, and from them how tokens of a chunk read each other, a square of (L, L);
the outputs. Backward, for the second pass and then for the first: the gradients of the memory at
the borders, the square with the gradients of weights and gates, the gradients of the tokens.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from mezzo_gsa.ops.chunking.chunks import SEGMENT, Chunks
from mezzo_gsa.ops.chunking.triton.states import INNER, padded, precision, run_states
from mezzo_gsa.ops.gsa.tiling import gate_tiles
from mezzo_gsa.ops.gsa.triton.gate import gate_kernel
from mezzo_gsa.ops.gsa.triton.slots import slots_bwd_kernel, slots_fwd_kernel
from mezzo_gsa.ops.gsa.triton.tokens import swish_kernel, tokens_kernel

BAND = {torch.float32: 40.0, torch.bfloat16: 120.0, torch.float16: 40.0}
"""Width of a band of running sums: factors up to exp(BAND / 2) lose no digits."""


class Form(NamedTuple):
    """What to compute, besides tensors."""

    scale: float
    between: str
    damping: float | None
    """g holds logits: the gate is logsigmoid(g) / damping. None: g is the log gate."""


class Inputs(NamedTuple):
    """What a call reads; q, k, v, g may be parts of one projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    s: Tensor | None


class Memory(NamedTuple):
    """The memories at the borders of chunks, and what the gates come to."""

    running: Tensor
    strength: Tensor | None
    """For the backward."""
    write: Tensor
    decay: Tensor
    bands: Tensor
    kept: Tensor
    k_states: Tensor
    v_states: Tensor
    k_starts: Tensor | None
    v_starts: Tensor | None


def run_memory(
    x: Inputs,
    k0: Tensor | None,
    v0: Tensor | None,
    form: Form,
    chunks: Chunks,
    *,
    for_backward: bool,
) -> tuple[Memory, Tensor, Tensor]:
    """Return the memories at the chunks' borders, and the final K~ and V~ (S, H, M, ·)."""
    B, T, H, M = x.g.shape
    dtype = x.k.dtype
    # One precision up: differences of running sums must keep the digits that results have.
    sums = torch.float64 if dtype == torch.float32 else torch.float32
    running = torch.empty((B, T, H, M), dtype=sums, device=x.k.device)
    write = torch.empty_like(running, dtype=dtype)
    # In 16 bits each slot's strengths would be wrong in their own way, which a softmax magnifies.
    strength = torch.empty_like(running, dtype=torch.float32) if for_backward else None
    decay = torch.empty((chunks.num_chunks, H, M), device=x.k.device)
    tiles = gate_tiles(M)
    bands = torch.empty((chunks.num_chunks, H, tiles), dtype=torch.int32, device=x.k.device)
    gate_kernel[(chunks.num_chunks * H, tiles)](
        x.g, x.s, chunks.chunk_table, running, strength, write, decay, bands,
        T, chunks.per_row, x.g.stride(1),
        H=H, M=M, BM=padded(M) // tiles, L=chunks.length, SEGMENT=SEGMENT, DAMPING=form.damping,
        WIDTH=BAND[dtype], num_warps=8,
    )  # fmt: skip
    split = chunks.is_split or k0 is not None
    k_states, k_starts, k_last, kept = run_states(x.k, write, decay, k0, chunks, split=split)
    v_states, v_starts, v_last, _ = run_states(x.v, write, decay, v0, chunks, split=split)
    memory = Memory(
        running, strength, write, decay, bands, kept, k_states, v_states, k_starts, v_starts
    )
    return memory, k_last, v_last


def slots_fwd(
    x: Inputs, memory: Memory, form: Form, chunks: Chunks, *, differentiable: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return o (B, T, HQ, V) and, for the backward, the logits of the slots and the weights."""
    B, T, HQ = x.q.shape[:3]
    M = x.g.shape[3]
    o = torch.empty((B, T, HQ, x.v.shape[3]), dtype=x.q.dtype, device=x.q.device)
    weights = torch.empty((B, T, HQ, M), dtype=x.q.dtype, device=x.q.device)
    logits = torch.empty_like(weights, dtype=torch.float32) if differentiable else None
    squares = _squares(x, chunks)
    grid, N = (chunks.num_chunks * HQ,), chunks.per_row
    settings = {"HQ": HQ, "H": x.k.shape[2], "M": M, **_chunk_settings(x, chunks)}
    for bands in _band_forms(M):
        slots_fwd_kernel[grid](
            x.q, x.k, x.g, x.s, memory.running, memory.bands, memory.k_states,
            memory.k_starts, memory.kept, chunks.chunk_table, squares, logits, weights,
            T, N, x.q.stride(1), x.k.stride(1), x.g.stride(1), form.scale,
            **settings, **_factors(x), K=x.k.shape[3], BK=_tile(x.k),
            BETWEEN=form.between, DAMPING=form.damping, BANDS=bands, num_stages=3,
        )  # fmt: skip
    tokens_kernel[grid](
        squares, None, x.v, None, weights, memory.v_states, memory.v_starts, memory.kept,
        None, None, None, chunks.chunk_table, None, None, o, None,
        T, N, 0, x.v.stride(1), 0, o.stride(1), 0, **settings, D=x.v.shape[3], BD=_tile(x.v),
        num_stages=3,
    )  # fmt: skip
    return o, logits, weights if differentiable else None


def gsa_bwd(
    do: Tensor,
    dk_last: Tensor | None,
    dv_last: Tensor | None,
    x: Inputs,
    raw: Inputs | None,
    memory: Memory,
    logits: Tensor,
    weights: Tensor,
    grads: Inputs,
    form: Form,
    chunks: Chunks,
) -> tuple[Tensor, Tensor]:
    """Write the gradients of the inputs into `grads`; return those of the initial K~ and V~.

    With grouped heads, gradients of k, v, g and s are those of each query head: (B, T, HQ, ·).
    Where `raw` is given, swish turned it into x, and the gradients are those of `raw`.
    """
    _, T, HQ, M = logits.shape
    H = x.k.shape[2]
    dlogits, part_dg = torch.empty_like(logits), torch.empty_like(logits)
    part_ds = None if grads.s is None else torch.empty_like(logits)
    k_weights = torch.empty_like(weights)
    squares = _squares(x, chunks)
    settings = {"HQ": HQ, "H": H, "M": M, **_chunk_settings(x, chunks)}
    grid, N = (chunks.num_chunks * HQ,), chunks.per_row
    passes = (
        Pass(do, x.v, None, raw and raw.v, memory.v_states, memory.v_starts, weights, dv_last),
        Pass(x.q, x.k, raw and raw.q, raw and raw.k, memory.k_states, memory.k_starts, k_weights,
             dk_last),
    )  # fmt: skip
    initial_gradients = []
    for one, dleft, dright in zip(passes, (None, grads.q), (grads.v, grads.k), strict=True):
        values, D = dleft is None, one.right.shape[3]
        dstates, dstarts, dinitial, dkept = run_states(
            one.left, one.weights, memory.decay, one.last, chunks,
            split=chunks.is_split or one.last is not None, reverse=True,
        )  # fmt: skip
        initial_gradients.append(dinitial)
        borders = (
            one.states, one.starts, memory.kept, dstates, dstarts, dkept, chunks.chunk_table,
        )  # fmt: skip
        for bands in _band_forms(M):
            slots_bwd_kernel[grid](
                one.left, one.right, x.g, memory.running, memory.strength, memory.bands, logits,
                *borders, dlogits, k_weights, part_dg, part_ds, squares, grads.g, grads.s,
                T, N, one.left.stride(1), one.right.stride(1), x.g.stride(1), grads.g.stride(1),
                form.scale, **settings, **_factors(x), D=D, BD=_tile(one.right),
                BETWEEN=form.between, DAMPING=form.damping, OWN_STRENGTH=x.s is not None,
                VALUES=values, BANDS=bands, num_stages=3,
            )  # fmt: skip
        tokens_kernel[grid](
            squares, one.left, one.right, memory.write, k_weights, *borders,
            one.raw_left, one.raw_right, dleft, dright, T, N,
            one.left.stride(1), one.right.stride(1), 0 if raw is None else raw.q.stride(1),
            0 if dleft is None else dleft.stride(1), dright.stride(1),
            **settings, D=D, BD=_tile(one.right),
            num_stages=3 if values else 2,  # both sides' tiles are too large three at a time
        )  # fmt: skip
    dv0, dk0 = initial_gradients
    return dk0, dv0


class Pass(NamedTuple):
    """One of the two passes in the backward: dright = squareᵀ left + ..., as the kernels put it."""

    left: Tensor
    right: Tensor
    raw_left: Tensor | None
    raw_right: Tensor | None
    states: Tensor
    starts: Tensor | None
    weights: Tensor
    last: Tensor | None


def apply_swish(x: Tensor) -> Tensor:
    """Return swish of a contiguous tensor: of q, k and v, and for nothing of the gate's logits."""
    y = torch.empty_like(x)
    swish_kernel[(triton.cdiv(x.numel(), 4096),)](x, y, x.numel(), BLOCK=4096, num_warps=4)
    return y


def _chunk_settings(x: Inputs, chunks: Chunks) -> dict[str, Any]:
    return {
        "L": chunks.length,
        "BM": padded(x.g.shape[3]),
        "SEGMENT": SEGMENT,
        "PRECISION": precision(x.q.dtype),
        "num_warps": 4 if chunks.length < 128 and x.g.shape[3] <= 64 else 8,
    }


def _band_forms(num_slots: int) -> tuple[str, ...]:
    """Return the forms of a kernel that share the chunks: at 128 slots one for all is faster."""
    return ("one", "more") if num_slots <= 64 else ("any",)


def _factors(x: Inputs) -> dict[str, Any]:
    tiles = gate_tiles(x.g.shape[3])
    return {"WIDTH": BAND[x.q.dtype], "INNER": INNER[x.q.dtype], "M_TILES": tiles}


def _squares(x: Inputs, chunks: Chunks) -> Tensor:
    """Return room for what tokens read of each other, (chunks · HQ, L, L) of the type INNER."""
    L, dtype = chunks.length, x.q.dtype
    shape = (chunks.num_chunks * x.q.shape[2], L, L)
    return x.q.new_empty(shape, dtype=torch.float32 if dtype == torch.float16 else dtype)


def _tile(x: Tensor) -> int:
    """Return how many channels of a head are in the chip's memory at a time."""
    return min(32 if x.dtype == torch.float32 else 64, padded(x.shape[3]))
