"""The running sums of a chunk's log gates, and its keys decayed to the chunk's end.

KG is the gate's width: K if each key channel has a gate, 1 if each head has one.
"""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp

from mezzo_gsa.ops.chunking.triton.states import locate_chunk


@triton.jit
def gate_columns(o_k, KG: tl.constexpr):
    """Return the column of the gate that each key channel uses."""
    return o_k if KG > 1 else o_k * 0


@triton.jit(do_not_specialize=["T", "N"])
def gate_kernel(
    g, k, chunk_table, running, write, decay, T, N, stride_g, stride_k,
    H: tl.constexpr, K: tl.constexpr, KG: tl.constexpr, L: tl.constexpr, BK: tl.constexpr,
    SEGMENT: tl.constexpr,
):  # fmt: skip
    """Write running sums G of log gates, keys decayed to the chunk's end, and the chunk's decay."""
    i_c, i_h, i_k = tl.program_id(0) // H, tl.program_id(0) % H, tl.program_id(1)
    start, length, _ = locate_chunk(i_c, chunk_table, T, N, L, SEGMENT)
    o_l, o_k = tl.arange(0, L), i_k * BK + tl.arange(0, BK)
    o_t, o_g = start + o_l, gate_columns(o_k, KG)
    m_k = o_k < K
    m = (o_l < length)[:, None] & m_k[None, :]
    b_g = tl.load(g + o_t[:, None] * stride_g + i_h * KG + o_g[None, :], mask=m, other=0.0)
    # exp(-100) is negligible in float32. Lower log gates would only make the running sums lose
    # digits.
    b_g = tl.where(b_g < -100.0, -100.0, b_g)
    b_running = tl.cumsum(b_g.to(running.dtype.element_ty), 0)
    # Padding has g = 0, so the last row is the sum of all.
    b_total = tl.sum(tl.where((o_l == L - 1)[:, None], b_running, 0.0), 0)
    b_k = tl.load(k + o_t[:, None] * stride_k + i_h * K + o_k[None, :], mask=m, other=0.0)
    b_write = b_k.to(tl.float32) * exp((b_total[None, :] - b_running).to(tl.float32))
    o_row = o_t[:, None] * H + i_h
    tl.store(write + o_row * K + o_k[None, :], b_write.to(write.dtype.element_ty), mask=m)
    p_decay = decay + (i_c.to(tl.int64) * H + i_h) * K + o_k
    tl.store(p_decay, exp(b_total.to(tl.float32)), mask=m_k)
    m_g = m if KG > 1 else m & (o_k == 0)[None, :]
    tl.store(running + o_row * KG + o_g[None, :], b_running, mask=m_g)
