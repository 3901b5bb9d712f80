"""What all kernels of the gated scan share: the gates, and the tokens that a program owns."""

import triton
import triton.language as tl

# The logits that padding is read as: KEEP keeps the state and writes nothing into it, SHUT lets
# nothing out.
KEEP, SHUT = tl.constexpr(float("inf")), tl.constexpr(float("-inf"))


@triton.jit
def sigmoid(b_e):
    """Return 1 / (1 + e) by rsqrt: a division is several instructions more."""
    b_r = tl.rsqrt(1.0 + b_e)
    return b_r * b_r


@triton.jit
def sigmoids(b_e):
    """Return sigmoid(x) and sigmoid(-x) from e = exp(-x).

    The smaller one is as precise as e, and the larger one is 1 minus it: a gate near one, which is
    raised to the power of thousands of tokens, is rounded once. Exact for e = inf; NaN stays NaN.
    """
    b_s = sigmoid(b_e)
    b_n = b_e * b_s
    return tl.where(b_e < 1.0, 1.0 - b_n, b_s), tl.where(b_e < 1.0, b_n, 1.0 - b_s)


@triton.jit
def exp_minus(b_x, b_shift):
    """Return exp(-x) 2**shift."""
    return tl.exp2(b_x.to(tl.float32) * -1.4426950408889634 + b_shift)


@triton.jit
def place(T, num_spans, span, C: tl.constexpr, BD: tl.constexpr):
    """Say what this program owns: its row, span and channels, and the borders of the span."""
    pid = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = tl.cdiv(C, BD)
    i_d, i_n, i_b = pid % ND, pid // ND % num_spans, pid // ND // num_spans
    start = i_n * span
    return i_b, i_n, i_d * BD + tl.arange(0, BD), start, tl.minimum(start + span, T)


@triton.jit
def end_of_real(lengths, i_b, end):
    """Return where the real tokens of a span end, the rest being padding."""
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + i_b))
    return end


@triton.jit
def bias_shift(bias, o_d, C: tl.constexpr, BD: tl.constexpr):
    """Return the shift of exp_minus that adds the bias to the logits.

    It is finite even for a bias of -inf. So padding, which is read as a logit of +inf, keeps the
    state whatever the bias.
    """
    b_shift = tl.zeros([BD], tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=o_d < C, other=0.0)
        b_shift += tl.where(b_bias < -1e38, -1e38, b_bias) * -1.4426950408889634
    return b_shift


@triton.jit
def load_rows(p_first, stride, t, end, m_d, other: tl.constexpr, BT: tl.constexpr):
    """Load the rows of BT tokens from t on, all under way at once; `other` from `end` on."""
    rows = ()
    for i in tl.static_range(BT):
        rows += (tl.load(p_first + i * stride, mask=m_d & (t + i < end), other=other),)  # type: ignore[assignment]
    return rows


@triton.jit
def border(owners, states, t, end, b_state, o_d, C: tl.constexpr):
    """Return the sequence with a border at token t, or -1, and the state, replaced if there is."""
    i_s = tl.load(owners + t, mask=t < end, other=-1).to(tl.int64)
    b_new = tl.load(states + i_s * C + o_d, mask=(o_d < C) & (i_s >= 0), other=0.0)
    return i_s, tl.where(i_s >= 0, b_new, b_state)
