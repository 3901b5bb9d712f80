"""States at the borders of chunks: first along segments, then along the segments of a sequence.

    h[c + 1] = d[c] ⊙ h[c] + W[c]ᵀ x[c]

W (tokens, H, M) are decayed write strengths (or keys), a chunk keeps the share d (chunks, H, M) of
a state, and x (tokens, H, D) are keys or values. In the backward the same kernels run backward in
time, for the gradients of the states.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from mezzo_core.ops.launch import launch
from mezzo_core.ops.ptxas import require_ptxas
from mezzo_core.ops.sizes import ceil_div, next_power_of_2
from torch import Tensor

from mezzo_gsa.ops.chunking.chunks import Chunks

require_ptxas()  # every module that launches matrix products imports this one

FULL = 264
"""Programs that fill a large GPU, two on each SM."""

INNER = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float32}
"""The type of factors inside kernels: they exceed the range of float16."""


@cache
def padded(size: int) -> int:
    """Return the width of a tile for `size` columns: a power of two; products need at least 16."""
    return max(16, next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    """Return the precision of products of float32 numbers, for inputs of a dtype.

    One product in TF32 keeps ten bits: more than bfloat16 has, but too few for float16.
    """
    if dtype == torch.bfloat16:
        return "tf32"
    return "tf32x3" if dtype == torch.float16 else "ieee"


@triton.jit
def locate_chunk(i_c, table, T, N, L: tl.constexpr, SEGMENT: tl.constexpr):
    """Return a chunk's first token (counted over all rows), its length, and its segment."""
    if table is not None:
        start = tl.load(table + i_c * 3).to(tl.int64)
        return start, tl.load(table + i_c * 3 + 1), tl.load(table + i_c * 3 + 2)
    i_b, i_n = i_c // N, i_c % N
    start = i_b.to(tl.int64) * T + i_n * L
    return start, tl.minimum(L, T - i_n * L), i_b * tl.cdiv(N, SEGMENT) + i_n // SEGMENT


@triton.jit
def load_kept(kept, i_c, i_h, o_m, H: tl.constexpr, M: tl.constexpr):
    """Return the share of the segment's first state left at the start of chunk i_c, (BM,)."""
    return tl.load(kept + (i_c.to(tl.int64) * H + i_h) * M + o_m, mask=o_m < M, other=0.0)


@triton.jit
def load_state(
    states, starts, b_kept, i_c, i_s, i_h, o_m, o_d,
    H: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Return h (BM, BD) in float32 at the start of chunk i_c, or its gradient at the end."""
    m = (o_m < M)[:, None] & (o_d < D)[None, :]
    o_tile = o_m[:, None] * D + o_d[None, :]
    p_state = states + (i_c.to(tl.int64) * H + i_h) * M * D
    b_h = tl.load(p_state + o_tile, mask=m, other=0.0).to(tl.float32)
    if starts is not None:
        p_start = starts + (i_s.to(tl.int64) * H + i_h) * M * D
        b_start = tl.load(p_start + o_tile, mask=m, other=0.0)
        b_h += b_kept[:, None] * b_start.to(tl.float32)
    return b_h


@triton.jit
def load_decay(p_decay, m_m, first, j, count, stride, REVERSE: tl.constexpr):
    """Return the share that the j-th chunk of a segment keeps, (BM,); zeros after the last."""
    i_c = first + (count - 1 - j if REVERSE else j)
    return tl.load(p_decay + i_c.to(tl.int64) * stride, mask=m_m & (j < count), other=0.0)


@triton.jit(do_not_specialize=["T", "N"])
def segment_states_kernel(
    x, write, decay, chunk_table, segment_table, states, last, kept, whole,
    T, N, stride_x,
    H: tl.constexpr, HD: tl.constexpr,
    M: tl.constexpr, D: tl.constexpr, L: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, SEGMENT: tl.constexpr,
    REVERSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute a tile (BM, BD) of the states along a segment, starting from zero.

    `decay` has HD heads; H / HD heads share each.
    """
    # The tiles of a segment run together, because they share x and W.
    tiles_d: tl.constexpr = tl.cdiv(D, BD)
    tiles: tl.constexpr = tiles_d * tl.cdiv(M, BM)
    i_d, i_m = tl.program_id(0) % tiles_d, tl.program_id(0) % tiles // tiles_d
    i_s, i_h = tl.program_id(0) // tiles // H, tl.program_id(0) // tiles % H
    if segment_table is not None:
        first, count = tl.load(segment_table + i_s * 2), tl.load(segment_table + i_s * 2 + 1)
    else:
        per_row = tl.cdiv(N, SEGMENT)
        first = i_s // per_row * N + i_s % per_row * SEGMENT
        count = tl.minimum(SEGMENT, N - i_s % per_row * SEGMENT)
    o_m, o_d, o_l = i_m * BM + tl.arange(0, BM), i_d * BD + tl.arange(0, BD), tl.arange(0, L)
    m_m, m_d = o_m < M, o_d < D
    m_tile = m_m[:, None] & m_d[None, :]
    o_tile = o_m[:, None] * D + o_d[None, :]
    p_x = x + i_h * D + o_d[None, :]
    b_h = tl.zeros([BM, BD], tl.float32)
    b_kept = tl.full([BM], 1.0, tl.float32)
    # Load the decay one chunk ahead. The compiler prefetches the operands of products only.
    p_decay = decay + i_h // (H // HD) * M + o_m
    b_decay = load_decay(p_decay, m_m, first, 0, count, HD * M, REVERSE)
    for j in range(count):
        i_c = first + (count - 1 - j if REVERSE else j)
        b_ahead = load_decay(p_decay, m_m, first, j + 1, count, HD * M, REVERSE)
        start, length, _ = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
        m_l = o_l < length
        o_state = (i_c.to(tl.int64) * H + i_h) * M
        tl.store(states + o_state * D + o_tile, b_h.to(states.dtype.element_ty), mask=m_tile)
        if i_d == 0:
            tl.store(kept + o_state + o_m, b_kept, mask=m_m)
        p_w = write + ((start + o_l)[:, None] * H + i_h) * M + o_m[None, :]
        b_w = tl.load(p_w, mask=m_l[:, None] & m_m[None, :], other=0.0)
        b_x = tl.load(p_x + (start + o_l)[:, None] * stride_x, mask=m_l[:, None] & m_d[None, :],
                      other=0.0)  # fmt: skip
        b_h = tl.dot(tl.trans(b_w), b_x, b_h * b_decay[:, None], input_precision=PRECISION)
        b_kept *= b_decay
        b_decay = b_ahead
    o_last = (i_s.to(tl.int64) * H + i_h) * M
    tl.store(last + o_last * D + o_tile, b_h, mask=m_tile)
    if i_d == 0:
        tl.store(whole + o_last + o_m, b_kept, mask=m_m)


@triton.jit(do_not_specialize=["num_segments"])
def join_segments_kernel(
    last, whole, initial, sequence_table, starts, final, num_segments,
    H: tl.constexpr, HI: tl.constexpr, M: tl.constexpr, D: tl.constexpr,
    BM: tl.constexpr, BD: tl.constexpr, REVERSE: tl.constexpr,
):  # fmt: skip
    """Go along the segments of a sequence; write the state at each segment's start, and the last.

    `initial` has HI heads. Of the H / HI heads that share one, the first starts from it and the
    others from zero, because the caller sums them.
    """
    i_b, i_h = tl.program_id(0) // H, tl.program_id(0) % H
    i_d, i_m = tl.program_id(1), tl.program_id(2)
    if sequence_table is not None:
        first = tl.load(sequence_table + i_b * 2)
        num_segments = tl.load(sequence_table + i_b * 2 + 1)
    else:
        first = i_b * num_segments
    o_m, o_d = i_m * BM + tl.arange(0, BM), i_d * BD + tl.arange(0, BD)
    m = (o_m < M)[:, None] & (o_d < D)[None, :]
    o_tile = o_m[:, None] * D + o_d[None, :]
    b_h = tl.zeros([BM, BD], tl.float32)
    if initial is not None:
        p_initial = initial + (i_b.to(tl.int64) * HI + i_h // (H // HI)) * M * D
        b_h += tl.load(p_initial + o_tile, mask=m & (i_h % (H // HI) == 0), other=0.0)
    for j in range(num_segments):
        i_s = first + (num_segments - 1 - j if REVERSE else j)
        o_s = (i_s.to(tl.int64) * H + i_h) * M
        if starts is not None:
            tl.store(starts + o_s * D + o_tile, b_h.to(starts.dtype.element_ty), mask=m)
        b_whole = tl.load(whole + o_s + o_m, mask=o_m < M, other=0.0)
        b_h = b_h * b_whole[:, None] + tl.load(last + o_s * D + o_tile, mask=m, other=0.0)
    o_final = (i_b.to(tl.int64) * H + i_h) * M * D
    tl.store(final + o_final + o_tile, b_h, mask=m)


def run_states(
    x: Tensor,
    write: Tensor,
    decay: Tensor,
    initial: Tensor | None,
    chunks: Chunks,
    *,
    split: bool,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Compute h[c + 1] = d[c] h[c] + W[c]ᵀ x[c] over the chunks of every sequence.

    Args:
        x: (B, T, H, D).
        write: W (B, T, H, M).
        decay: d (chunks, HD, M); H / HD heads share each.
        initial: (S, HI, M, D) float32, or None for zeros.
        chunks: their positions.
        split: whether a segment may start from a state other than zero.
        reverse: go from the last chunk to the first.

    Returns:
        states: (chunks, H, M, D), the state at the start of each chunk (reversed: at its end), if
            its segment starts from zero.
        starts: (segments, H, M, D), the state at the start of each segment; None if not split.
        final: (S, H, M, D) float32, the final state.
        kept: (chunks, H, M), the share of the segment's first state left at each chunk's start.
    """
    T, H, D = x.shape[1:]
    M = write.shape[3]
    device = x.device
    states = torch.empty((chunks.num_chunks, H, M, D), dtype=x.dtype, device=device)
    kept = torch.empty((chunks.num_chunks, H, M), device=device)
    last = torch.empty((chunks.num_segments, H, M, D), device=device)
    whole = torch.empty((chunks.num_segments, H, M), device=device)
    BM, BD = min(64, padded(M)), min(64, padded(D))
    if x.dtype != torch.float32 and M > 64 and D >= 256:
        BD = 128  # each tile of D reads W: fewer tiles read it less often
    programs = chunks.num_segments * H * ceil_div(D, BD) * ceil_div(M, BM)
    launch(
        segment_states_kernel, (programs,),
        x, write, decay, chunks.chunk_table, chunks.segment_table, states, last, kept, whole,
        T, chunks.per_row, x.stride(1),
        H=H, HD=decay.shape[1], M=M, D=D, L=chunks.length, BM=BM, BD=BD, SEGMENT=chunks.per_segment,
        REVERSE=reverse, PRECISION=precision(x.dtype), num_warps=4,
        num_stages=2 if programs > FULL else 3,  # with two stages an SM holds more programs
    )  # fmt: skip
    if not split:
        return states, None, last, kept
    starts = torch.empty_like(last, dtype=x.dtype)
    final = torch.empty((chunks.num_sequences, H, M, D), device=device)
    BM, BD = min(16, BM), min(64, BD)
    tiles = (ceil_div(D, BD), ceil_div(M, BM))
    launch(
        join_segments_kernel, (chunks.num_sequences * H, tiles[0], tiles[1]),
        last, whole, initial, chunks.sequence_table, starts, final, chunks.segments_per_row,
        H=H, HI=H if initial is None else initial.shape[1], M=M, D=D, BM=BM, BD=BD,
        REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return states, starts, final, kept
