"""Functions that all kernels of the gated scan share: gates, loads, and a program's tokens."""

import triton
import triton.language as tl

# Gate logits that stand for padding. A forget gate of KEEP keeps the state and writes nothing into
# it; an output gate of SHUT makes the output zero.
KEEP, SHUT = tl.constexpr(float("inf")), tl.constexpr(float("-inf"))


@triton.jit
def sigmoid(b_e):
    """Return 1 / (1 + e), computed by rsqrt: a division takes several more instructions."""
    b_r = tl.rsqrt(1.0 + b_e)
    return b_r * b_r


@triton.jit
def sigmoids(b_e):
    """Return sigmoid(x) and sigmoid(-x) from e = exp(-x).

    The smaller of the two is as precise as e, and the larger is 1 minus the smaller. So a gate near
    one is rounded only once, which matters because it is multiplied with itself over thousands of
    tokens. The results are exact for e = inf, and NaN stays NaN.
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
    """Return what this program owns: row, span, channels, and the borders of the span."""
    pid = tl.program_id(0).to(tl.int64)
    ND: tl.constexpr = tl.cdiv(C, BD)
    i_d, i_n, i_b = pid % ND, pid // ND % num_spans, pid // ND // num_spans
    start = i_n * span
    return i_b, i_n, i_d * BD + tl.arange(0, BD), start, tl.minimum(start + span, T)


@triton.jit
def end_of_real(lengths, i_b, end):
    """Return where the real tokens of a span end; padding follows."""
    if lengths is not None:
        end = tl.minimum(end, tl.load(lengths + i_b))
    return end


@triton.jit
def bias_shift(bias, o_d, C: tl.constexpr, BD: tl.constexpr):
    """Return the shift of exp_minus that adds the bias to the logits.

    The shift is finite even for a bias of -inf. So padding, whose logit is +inf, keeps the state
    whatever the bias is.
    """
    b_shift = tl.zeros([BD], tl.float32)
    if bias is not None:
        b_bias = tl.load(bias + o_d, mask=o_d < C, other=0.0)
        b_shift += tl.where(b_bias < -1e38, -1e38, b_bias) * -1.4426950408889634
    return b_shift


@triton.jit
def load_rows(p_first, stride, t, end, m_d, other: tl.constexpr, BT: tl.constexpr):
    """Load the rows of BT tokens from t on, all at once; tokens from `end` on are `other`."""
    rows = ()
    for i in tl.static_range(BT):
        rows += (tl.load(p_first + i * stride, mask=m_d & (t + i < end), other=other),)  # type: ignore[assignment]
    return rows


@triton.jit
def border(owners, states, t, end, b_state, o_d, C: tl.constexpr):
    """Return the sequence that has a border at token t, or -1, and the state after the border.

    At a border the state is that sequence's row of `states`; elsewhere it is b_state.
    """
    i_s = tl.load(owners + t, mask=t < end, other=-1).to(tl.int64)
    b_new = tl.load(states + i_s * C + o_d, mask=(o_d < C) & (i_s >= 0), other=0.0)
    return i_s, tl.where(i_s >= 0, b_new, b_state)
