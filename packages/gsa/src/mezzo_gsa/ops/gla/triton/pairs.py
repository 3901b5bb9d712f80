"""Scores of the pairs of tokens in a chunk: the weight with which t reads what i wrote.

If each head has one gate, the decay of a pair is the same for all channels. Then the scores are one
matrix product, times a matrix of decays.

If each channel has a gate, the decay exp(G[t] - G[i]) must be split into a factor of t and a factor
of i, at a pivot P: exp(G[t] - P) exp(P - G[i]).

- If t is in the right half of the chunk and i in the left half, P is G at the middle. Neither
  factor exceeds one.
- If both are in one half, P is G at the start of the half. exp(G[t] - P) is at most one. And
  exp(P - G[i]) is at most exp(MILD), as long as the half has decayed mildly up to row t.
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
def products(b_x, b_y, dtype: tl.constexpr, PRECISION: tl.constexpr):
    """Return the products (L, L) of the rows of two tiles (L, BK)."""
    return tl.dot(b_x.to(dtype), tl.trans(b_y.to(dtype)), input_precision=PRECISION)


@triton.jit
def channel_scores(
    b_q, b_k, b_g, p_g, o_l, m_k, length, stride, dtype: tl.constexpr,
    L: tl.constexpr, LEVELS: tl.constexpr, MILD: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the contribution of a tile of channels to the scores (L, L) of pairs i <= t."""
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
    """Add to dq and dk of the tokens o_l (L,) of a half the contribution of its pairs i < t.

    b_da (L, L) is the gradient of the pairs' scores. b_start (1, BK) is P at the half's start.
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
