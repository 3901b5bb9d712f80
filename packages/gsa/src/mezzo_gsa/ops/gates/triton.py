"""What kernels do to single numbers: activations, gates, and what gates leave."""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """Return e^x, x float32, in fewer instructions than tl.exp, which takes care of denormals."""
    return tl.exp2(1.4426950408889634 * x)


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)), x float32.

    The square of a reciprocal root takes fewer instructions than a division.
    """
    root = tl.rsqrt(1.0 + exp(-x))
    return root * root


@triton.jit
def swish(x):
    """Return x sigmoid(x) in float32."""
    x = x.to(tl.float32)
    return x * sigmoid(x)


@triton.jit
def log_sigmoid(b_x):
    """Return min(x, 0) - log(1 + e), e = exp(-|x|), in float32.

    log(1 + e) is 2 atanh(e / (2 + e)), by its series: a logarithm near one loses digits.
    """
    b_e = exp(-tl.abs(b_x))
    b_w = b_e / (2.0 + b_e)  # at most 1/3
    b_w2 = b_w * b_w
    b_sum = 1.0 / 15.0
    b_sum = b_sum * b_w2 + 1.0 / 13.0
    b_sum = b_sum * b_w2 + 1.0 / 11.0
    b_sum = b_sum * b_w2 + 1.0 / 9.0
    b_sum = b_sum * b_w2 + 1.0 / 7.0
    b_sum = b_sum * b_w2 + 1.0 / 5.0
    b_sum = b_sum * b_w2 + 1.0 / 3.0
    b_sum = b_sum * b_w2 + 1.0
    return tl.minimum(b_x, 0.0) - 2.0 * b_w * b_sum


@triton.jit
def write_strength(b_g):
    """Return 1 - exp(g) without losing digits where g is near 0: its series there."""
    b_series = -b_g * (1 + b_g * (0.5 + b_g * (1 / 6 + b_g * (1 / 24 + b_g / 120))))
    return tl.where(b_g > -0.1, b_series, 1.0 - exp(b_g))
