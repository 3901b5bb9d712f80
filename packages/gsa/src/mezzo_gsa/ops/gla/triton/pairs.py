"""How much each token of a chunk reads of what each earlier one wrote: scores of pairs, and back.

With a gate of each head the decay of a pair is one number for all channels: the scores are one
product, times a matrix of decays. With a gate of each channel, the pair of t in the right and i in
the left half of the chunk is parted at the middle: exp(G[t] - P) exp(P - G[i]), factors that never
exceed one. A pair of one half takes P at the half's start: exp(G[t] - P) is at most one again, and
exp(P - G[i]) at most exp(MILD) for the rows t before which the half has decayed mildly. Rows after
that are parted by levels, down to single tokens (see `mezzo_gsa.ops.chunking.halves`); with the
gates of trained models there are hardly any. What t reads is so computed from tokens up to t alone.

A token's own pair does not decay; it is kept apart from the others, and so what cancels in the
gate's gradient is never added.
"""

import triton
import triton.language as tl

from mezzo_gsa.ops.chunking.triton.products import dot_wide, load_running
from mezzo_gsa.ops.gates.triton import exp


@triton.jit
def parting(L: tl.constexpr):
    """Return (L, L): for i < t, the bits in which they differ: the highest is their level."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] > o_l[None, :], o_l[:, None] ^ o_l[None, :], 2 * L)


@triton.jit
def level_factor(p_running, b_running, o_l, m_m, length, stride, level):
    """Return X (L, BM) of the level whose nodes have 2^level tokens on each side."""
    o_pivot = ((o_l >> (level + 1)) << (level + 1)) + (1 << level) - 1
    b_pivot = load_running(p_running, o_pivot, m_m, length, stride)
    return exp(-tl.abs(b_running - b_pivot).to(tl.float32))


@triton.jit
def at_level(b_x, b_parting, level):
    """Keep the pairs that are parted at this level; zeros elsewhere."""
    return tl.where((b_parting >> level) == 1, b_x, 0.0)


@triton.jit
def on_diagonal(b_x, L: tl.constexpr):
    """Return the square (L, L) that is b_x, (L, 1) or (L, L), on its diagonal, else zero."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] == o_l[None, :], b_x, 0.0)


@triton.jit
def pair_decays(p_running, o_l, m_l, stride, L: tl.constexpr):
    """Return exp(G[t] - G[i]) (L, L) for i <= t, of a gate of one head; zeros elsewhere."""
    b_t = tl.load(p_running + o_l * stride, mask=m_l, other=0.0)
    b_i = tl.trans(b_t[:, None])
    m = (o_l[:, None] >= tl.arange(0, L)[None, :]) & m_l[:, None]
    return tl.where(m, exp(-tl.abs(b_t[:, None] - b_i).to(tl.float32)), 0.0)


@triton.jit
def half_factors(
    p_g, b_g, o_l, m_k, length, stride,
    L: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr,
):  # fmt: skip
    """Return what parts pairs at the middle or the start of a half, and which rows need more.

    Returns:
        exp(G[t] - P), P at the start of the own half; exp(P - G[i]), at most exp(MILD); exp(P -
        G[i]), P in the middle, for the left half, (L, BK) each; (L, 1) rows that decay by more than
        exp(-MILD) from P on; and how many levels part the pairs of those: zero if there are none.
    """
    o_middle = tl.minimum(L // 2, length) - 1
    b_middle = tl.load(p_g + o_middle * stride, mask=m_k[None, :] & (length > 0), other=0.0)
    b_start = tl.where((o_l >= L // 2)[:, None], b_middle, 0.0)
    b_since = tl.minimum(b_g - b_start, 0.0).to(tl.float32)
    b_until = tl.minimum(b_middle - b_g, 0.0).to(tl.float32)
    m_steep = (tl.min(b_since, 1) < -MILD)[:, None]
    levels = LEVELS * tl.max(tl.max(m_steep.to(tl.int32), 1), 0)
    b_down = exp(tl.minimum(-b_since, MILD))
    return exp(b_since), b_down, exp(b_until), m_steep, levels


@triton.jit
def products(b_x, b_y, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products (L, L) of the rows of two tiles (L, BK)."""
    return tl.dot(b_x.to(dtype), tl.trans(b_y.to(dtype)), input_precision=PRECISION)


@triton.jit
def channel_scores(
    b_q, b_k, b_g, p_g, o_l, m_k, length, stride, dtype: tl.constexpr,
    L: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return what a tile of channels adds to the scores (L, L) of pairs i <= t."""
    b_up, b_down, b_far, m_steep, levels = half_factors(
        p_g, b_g, o_l, m_k, length, stride, L, LEVELS, MILD
    )
    b_parting = parting(L)
    b_read = b_q * b_up
    b_near = products(b_read, b_k * b_down, dtype, PRECISION)
    b_far = products(b_read, b_k * b_far, dtype, PRECISION)
    b_a = on_diagonal(tl.sum(b_q * b_k, 1)[:, None], L)
    b_a += tl.where((b_parting < L // 2) & ~m_steep, b_near, 0.0)
    b_a += at_level(b_far, b_parting, LEVELS)
    for level in range(levels):
        b_x = level_factor(p_g, b_g, o_l, m_k, length, stride, level)
        b_part = products(b_q * b_x, b_k * b_x, dtype, PRECISION)
        b_a += at_level(tl.where(m_steep, b_part, 0.0), b_parting, level)
    return b_a


@triton.jit
def scores_bwd_of_half(
    b_da, b_dq, b_dk, b_q, b_k, b_g, b_start, p_g, o_l, m_k, length, stride, dtype: tl.constexpr,
    L: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return dq and dk of the tokens o_l (L,) of a half, with what pairs i < t in it add to them.

    b_da (L, L) is the gradient of their scores, b_start (1, BK) P at the half's start.
    """
    b_parting = tl.where(o_l[:, None] > o_l[None, :], o_l[:, None] ^ o_l[None, :], 0)
    b_since = tl.minimum(b_g - b_start, 0.0).to(tl.float32)
    b_up, b_down = exp(b_since), exp(tl.minimum(-b_since, MILD))
    m_steep = (tl.min(b_since, 1) < -MILD)[:, None]
    levels = LEVELS * tl.max(tl.max(m_steep.to(tl.int32), 1), 0)
    b_near = tl.where((b_parting > 0) & ~m_steep, b_da, 0.0).to(dtype)
    b_dq += b_up * dot_wide(b_near, b_k * b_down, PRECISION)
    b_dk += b_down * dot_wide(tl.trans(b_near), b_q * b_up, PRECISION)
    for level in range(levels):
        b_x = level_factor(p_g, b_g, o_l, m_k, length, stride, level)
        b_part = at_level(tl.where(m_steep, b_da, 0.0), b_parting, level).to(dtype)
        b_dq += b_x * dot_wide(b_part, b_k * b_x, PRECISION)
        b_dk += b_x * dot_wide(tl.trans(b_part), b_q * b_x, PRECISION)
    return b_dq, b_dk
