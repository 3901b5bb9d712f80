"""The gates of a chunk: running sums of their logs, write strengths, and the chunk's decay."""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp

from mezzo_gsa.ops.chunking.triton.states import locate_chunk
from mezzo_gsa.ops.gates.triton import log_sigmoid, write_strength


@triton.jit
def load_gate(g, o_gate, m, DAMPING: tl.constexpr):
    """Return the log forget gate (L, BM) in float32; with DAMPING, computed from its logits."""
    b_g = tl.load(g + o_gate, mask=m, other=0.0).to(tl.float32)
    if DAMPING is not None:
        b_g = tl.where(m, log_sigmoid(b_g) / DAMPING, 0.0)
    # exp(-100) is negligible, and sums keep their digits; a NaN would otherwise become -100.
    return tl.maximum(b_g, -100.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def own_strength(s, b_g, o_s, m):
    """Return the write strengths (L, BM) in float32: s, or 1 - exp(g) if s is None."""
    b_s = write_strength(b_g)
    if s is not None:
        b_s = tl.load(s + o_s, mask=m, other=0.0).to(tl.float32)
    return b_s


@triton.jit
def load_bands(bands, i_c, i_h, H: tl.constexpr, M_TILES: tl.constexpr):
    """Return how many bands the sums of a chunk and head reach: the most of its tiles."""
    return tl.max(tl.load(bands + (i_c * H + i_h) * M_TILES + tl.arange(0, M_TILES)), 0)


@triton.jit(do_not_specialize=["T", "N"])
def gate_kernel(
    g, s, chunk_table, running, strength, write, decay, bands, T, N, stride_g,
    H: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, L: tl.constexpr, SEGMENT: tl.constexpr,
    WIDTH: tl.constexpr, DAMPING: tl.constexpr,
):  # fmt: skip
    """Sum the log gates of one chunk and tile of slots, and write what follows from the sums.

    g are log gates, or logits with DAMPING; s is None for 1 - exp(g). `bands` is how many bands of
    WIDTH the sums reach (see `slots.py`). `strength` may be None.
    """
    i_c, i_h, i_m = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    start, length, _ = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_t, o_m = start + tl.arange(0, L), i_m * BM + tl.arange(0, BM)
    m = (tl.arange(0, L) < length)[:, None] & (o_m < M)[None, :]
    o_row = (o_t[:, None] * H + i_h) * M + o_m[None, :]
    b_g = load_gate(g, o_t[:, None] * stride_g + i_h * M + o_m[None, :], m, DAMPING)
    b_s = own_strength(s, b_g, o_row, m)
    b_running = tl.cumsum(b_g.to(running.dtype.element_ty), 0)
    # Padding has g = 0, so the last row is the sum of all.
    b_total = tl.sum(tl.where((tl.arange(0, L) == L - 1)[:, None], b_running, 0.0), 0)
    b_write = b_s * exp((b_total[None, :] - b_running).to(tl.float32))
    tl.store(running + o_row, b_running, mask=m)
    if strength is not None:
        tl.store(strength + o_row, b_s, mask=m)
    tl.store(write + o_row, b_write.to(write.dtype.element_ty), mask=m)
    p_decay = decay + (i_c.to(tl.int64) * H + i_h) * M + o_m
    tl.store(p_decay, exp(b_total.to(tl.float32)), mask=o_m < M)
    b_bands = tl.floor(-tl.min(b_total).to(tl.float32) / WIDTH).to(tl.int32) + 1
    tl.store(bands + (i_c * H + i_h) * tl.num_programs(1) + i_m, b_bands)
