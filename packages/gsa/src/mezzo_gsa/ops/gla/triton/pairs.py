"""Scores of the pairs of tokens in a chunk: the weight with which t reads what i wrote.

If each head has one gate, the decay of a pair is the same for all channels. Then the scores are one
matrix product, times a matrix of decays.

If each channel has a gate, the decay exp(G[t] - G[i]) must be split into a factor of t and a factor
of i, at a pivot P: exp(G[t] - P) exp(P - G[i]).

- If t is in the right half of the chunk and i in the left half, P is G at the middle. Neither
  factor exceeds one.
- If both are in one half, P is G at the start of the half. exp(G[t] - P) is at most one, and
  exp(P - G[i]) at most exp(MILD) as long as the half has decayed mildly up to row t.
- Later rows of a half are called steep. Their pairs are split at several levels, down to single
  tokens (see `mezzo_gsa.ops.chunking.halves`). With the gates of trained models there are hardly
  any steep rows.

So the scores of t depend only on tokens up to t.

The pair of a token with itself does not decay. It is computed apart from the others, because its
terms in the gate's gradient cancel and must not be added there.
"""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp

from mezzo_gsa.ops.chunking.triton.products import dot_wide, load_running


@triton.jit
def parting(L: tl.constexpr):
    """Return (L, L): for i < t, the bits in which i and t differ; the highest is their level."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] > o_l[None, :], o_l[:, None] ^ o_l[None, :], 2 * L)


@triton.jit
def level_factor(p_running, b_running, o_l, m_m, length, stride, level):
    """Return the factors (L, BM) of a level, whose nodes have 2^level tokens in each half."""
    o_pivot = ((o_l >> (level + 1)) << (level + 1)) + (1 << level) - 1
    b_pivot = load_running(p_running, o_pivot, m_m, length, stride)
    return exp(-tl.abs(b_running - b_pivot).to(tl.float32))


@triton.jit
def at_level(b_x, b_parting, level):
    """Keep the pairs that are split at this level; zeros elsewhere."""
    return tl.where((b_parting >> level) == 1, b_x, 0.0)


@triton.jit
def on_diagonal(b_x, L: tl.constexpr):
    """Return a square (L, L) with b_x, (L, 1) or (L, L), on its diagonal and zeros elsewhere."""
    o_l = tl.arange(0, L)
    return tl.where(o_l[:, None] == o_l[None, :], b_x, 0.0)


@triton.jit
def pair_decays(p_running, o_l, m_l, stride, L: tl.constexpr):
    """Return exp(G[t] - G[i]) (L, L) for i <= t, if each head has one gate; zeros elsewhere."""
    b_t = tl.load(p_running + o_l * stride, mask=m_l, other=0.0)
    b_i = tl.trans(b_t[:, None])
    m = (o_l[:, None] >= tl.arange(0, L)[None, :]) & m_l[:, None]
    return tl.where(m, exp(-tl.abs(b_t[:, None] - b_i).to(tl.float32)), 0.0)


@triton.jit
def half_factors(
    p_g, b_g, o_l, m_k, length, stride,
    L: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr,
):  # fmt: skip
    """Return the factors with a pivot at the middle or at a half's start, and the steep rows.

    Returns:
        Three factors, (L, BK) each: exp(G[t] - P) and exp(P - G[i]) with P at the start of the
        token's half, the second at most exp(MILD); and exp(P - G[i]) of the left half with P at the
        middle. Then the steep rows (L, 1), which decay by more than exp(-MILD) after P, and the
        number of levels that split their pairs: zero if there are no such rows.
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
def add_products(b_a, b_x, b_y, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Add to b_a (L, L) the products of the rows of two tiles (L, BK)."""
    return tl.dot(b_x.to(dtype), tl.trans(b_y.to(dtype)), b_a, input_precision=PRECISION)


@triton.jit
def add_channel_scores(
    b_near, b_across, b_q, b_k, b_g, p_g, o_l, m_k, length, stride, dtype: tl.constexpr,
    L: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add a tile of channels' part of the scores inside halves, and of those across them.

    Both are (L, L), and wrong for all other pairs: `join_scores` selects the right ones.
    """
    b_up, b_down, b_far, m_steep, levels = half_factors(
        p_g, b_g, o_l, m_k, length, stride, L, LEVELS, MILD
    )
    b_read = b_q * b_up
    b_across = add_products(b_across, b_read, b_k * b_far, dtype, PRECISION)
    b_read = tl.where(m_steep, 0.0, b_read)
    b_near = add_products(b_near, b_read, b_k * b_down, dtype, PRECISION)
    for level in tl.range(levels, num_stages=1):  # rare, so it must not take memory from the rest
        b_x = level_factor(p_g, b_g, o_l, m_k, length, stride, level)
        b_read = tl.where(m_steep, b_q * b_x, 0.0)
        b_part = add_products(tl.zeros_like(b_near), b_read, b_k * b_x, dtype, PRECISION)
        b_near += at_level(b_part, parting(L), level)
    return b_near, b_across


@triton.jit
def join_scores(b_near, b_across, b_own, L: tl.constexpr):
    """Return the scores (L, L) of all pairs i <= t; b_own (L,) are the scores for i = t."""
    b_parting = parting(L)
    b_a = tl.where(b_parting < L // 2, b_near, on_diagonal(b_own[:, None], L))
    return tl.where((b_parting >= L // 2) & (b_parting < L), b_across, b_a)


@triton.jit
def load_pairs(p_da, o_l, m_pairs, length, stride):
    """Load the gradients (L, L) of the scores of the pairs i < t that m_pairs selects.

    Other pairs are zero, by this load or as stored, so masking them takes no register.
    """
    m = m_pairs & (o_l < length)[:, None]
    return tl.load(p_da + o_l[:, None] * stride + o_l[None, :], mask=m, other=0.0)


@triton.jit
def channel_scores_bwd(
    b_dq, b_dk, b_q, b_k, b_g, p_g, p_da, o_l, m_k, length, stride, stride_da,
    dtype: tl.constexpr,
    L: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to dq and dk (L, BK) the contribution of the pairs i < t of a tile of channels."""
    b_up, b_down, b_far, m_steep, levels = half_factors(
        p_g, b_g, o_l, m_k, length, stride, L, LEVELS, MILD
    )
    m_right = o_l >= L // 2
    b_da = load_pairs(p_da, o_l, m_right[:, None] == m_right[None, :], length, stride_da).to(dtype)
    b_y = dot_wide(b_da, b_k.to(tl.float32) * b_down, PRECISION)
    b_dq += tl.where(m_steep, 0.0, b_up * b_y)
    b_read = b_q.to(tl.float32) * b_up
    b_dk += b_down * dot_wide(tl.trans(b_da), tl.where(m_steep, 0.0, b_read), PRECISION)
    b_da = load_pairs(p_da, o_l, m_right[:, None] & ~m_right[None, :], length, stride_da).to(dtype)
    b_dq += b_up * dot_wide(b_da, b_k.to(tl.float32) * b_far, PRECISION)
    b_dk += b_far * dot_wide(tl.trans(b_da), b_read, PRECISION)
    for level in tl.range(levels, num_stages=1):  # rare, so it must not take memory from the rest
        b_x = level_factor(p_g, b_g, o_l, m_k, length, stride, level)
        m_level = ((o_l[:, None] ^ o_l[None, :]) >> level) == 1
        b_da = load_pairs(p_da, o_l, m_level, length, stride_da).to(dtype)
        b_y = dot_wide(b_da, b_k.to(tl.float32) * b_x, PRECISION)
        b_dq += tl.where(m_steep, b_x * b_y, 0.0)
        b_read = tl.where(m_steep, b_q.to(tl.float32) * b_x, 0.0)
        b_dk += b_x * dot_wide(tl.trans(b_da), b_read, PRECISION)
    return b_dq, b_dk
