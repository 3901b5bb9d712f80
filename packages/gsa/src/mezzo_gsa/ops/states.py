"""States at the borders of chunks on a GPU: the launches of `triton_states`."""

import torch
import triton
import triton.language as tl
from mezzo_core.ops.ptxas import require_ptxas
from torch import Tensor

from mezzo_gsa.ops.chunks import SEGMENT, Chunks
from mezzo_gsa.ops.triton_states import join_segments_kernel, segment_states_kernel

require_ptxas()  # every kernel that multiplies is launched by a module that imports this one

FULL = 264
"""Programs that fill a large GPU, two on each SM."""

INNER = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float32}
"""The type of factors inside kernels: float16 has too few exponents for them."""


def padded(size: int) -> int:
    """Return the tile that holds `size` columns: a power of two, 16 or more for the products."""
    return max(16, triton.next_power_of_2(size))


def precision(dtype: torch.dtype) -> str:
    """Return how kernels multiply: float32 in full, not rounded to tf32."""
    return "ieee" if dtype == torch.float32 else "tf32"


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
    """Run h[c + 1] = d[c] h[c] + W[c]ᵀ x[c] over the chunks of every sequence.

    Args:
        x: (B, T, H, D).
        write: W (B, T, H, M).
        decay: d (chunks, HD, M), each head shared by H / HD.
        initial: (S, HI, M, D) float32, or None for zeros.
        chunks: where they lie.
        split: whether what flows into a segment may be other than zero.
        reverse: from the last chunk to the first.

    Returns:
        The states (chunks, H, M, D) that each chunk begins with (reversed: ends with), counted from
        zero at the segment's border; what flowed into each segment (segments, H, M, D), None if
        not split; the final state (S, H, M, D) float32; and (chunks, H, M), what is left of the
        flow into a segment when the chunk begins.
    """
    T, H, D = x.shape[1:]
    M = write.shape[3]
    device = x.device
    states = torch.empty((chunks.num_chunks, H, M, D), dtype=x.dtype, device=device)
    kept = torch.empty((chunks.num_chunks, H, M), device=device)
    last = torch.empty((chunks.num_segments, H, M, D), device=device)
    whole = torch.empty((chunks.num_segments, H, M), device=device)
    starts = torch.empty_like(last, dtype=x.dtype)
    final = torch.empty((chunks.num_sequences, H, M, D), device=device)
    BM, BD = min(64, padded(M)), min(64, padded(D))
    tiles = (triton.cdiv(D, BD), triton.cdiv(M, BM))
    is_large = chunks.num_segments * H * tiles[0] * tiles[1] > FULL
    segment_states_kernel[(chunks.num_segments * H, tiles[0], tiles[1])](
        x, write, decay, chunks.chunk_table, chunks.segment_table, states, last, kept, whole,
        T, chunks.per_row, x.stride(1),
        H=H, HD=decay.shape[1], M=M, D=D, L=chunks.length, BM=BM, BD=BD, SEGMENT=SEGMENT,
        REVERSE=reverse, PRECISION=precision(x.dtype), num_warps=4,
        num_stages=2 if is_large else 3,  # an SM holds three programs then, not two
    )  # fmt: skip
    if not split:
        return states, None, last, kept
    BM = min(16, BM)
    tiles = (triton.cdiv(D, BD), triton.cdiv(M, BM))
    join_segments_kernel[(chunks.num_sequences * H, tiles[0], tiles[1])](
        last, whole, initial, chunks.sequence_table, starts, final, chunks.segments_per_row,
        H=H, HI=H if initial is None else initial.shape[1], M=M, D=D, BM=BM, BD=BD,
        REVERSE=reverse, num_warps=4,
    )  # fmt: skip
    return states, starts, final, kept
