"""The forward of gated slot attention on a GPU: the launches of its kernels, in their order.

It computes the gates of each chunk, then the two memories at the chunks' borders, which depend only
on k, v and the gates. Then it computes the slots' weights and from them the square (L, L) of
weights between the tokens of a chunk, and last the outputs.
"""

from typing import NamedTuple

import torch
from mezzo_core.ops.sizes import ceil_div
from torch import Tensor

from mezzo_gsa.ops.chunking.chunks import SEGMENT
from mezzo_gsa.ops.chunking.triton.states import padded, run_states
from mezzo_gsa.ops.gsa.request import Memory, Request, Saved
from mezzo_gsa.ops.gsa.tiling import gate_tiles
from mezzo_gsa.ops.gsa.triton.gate import gate_kernel
from mezzo_gsa.ops.gsa.triton.settings import (
    BAND,
    band_forms,
    channel_tile,
    chunk_settings,
    empty_squares,
    slot_settings,
)
from mezzo_gsa.ops.gsa.triton.slots import slots_fwd_kernel
from mezzo_gsa.ops.gsa.triton.tokens import swish_kernel, tokens_kernel


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
    gate_kernel[(chunks.num_chunks * H, tiles)](
        x.g, x.s, chunks.chunk_table, running, strength, write, decay, bands,
        T, chunks.per_row, x.g.stride(1),
        H=H, M=M, BM=padded(M) // tiles, L=chunks.length, SEGMENT=SEGMENT, DAMPING=r.form.damping,
        WIDTH=BAND[dtype], num_warps=8,
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
        slots_fwd_kernel[grid](
            x.q, x.k, x.g, x.s, memory.running, memory.bands, memory.k_states,
            memory.k_starts, memory.kept, chunks.chunk_table, squares, logits, weights,
            T, N, x.q.stride(1), x.k.stride(1), x.g.stride(1), r.form.scale,
            **settings, **of_slots, K=x.k.shape[3], BK=channel_tile(x.k), BANDS=bands,
        )  # fmt: skip
    tokens_kernel[grid](
        squares, None, x.v, None, weights, memory.v_states, memory.v_starts, memory.kept,
        None, None, None, chunks.chunk_table, None, None, out, None,
        T, N, 0, x.v.stride(1), 0, out.stride(1), 0, **settings, D=V, BD=channel_tile(x.v),
        num_stages=3,
    )  # fmt: skip
    return out, Saved() if logits is None else Saved(logits, weights)


def apply_swish(x: Tensor) -> Tensor:
    """Return swish of a whole contiguous projection; that of the gate's logits is not used."""
    y = torch.empty_like(x)
    swish_kernel[(ceil_div(x.numel(), 4096),)](x, y, x.numel(), BLOCK=4096, num_warps=4)
    return y
