"""Elementwise functions for kernels: activations, gates and write strengths."""

import triton
import triton.language as tl
from mezzo_core.ops.triton import exp


@triton.jit
def sigmoid(x):
    """Return 1 / (1 + exp(-x)) of a float32 x.

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

    log(1 + e) is computed as 2 atanh(e / (2 + e)), by a series: the logarithm of a number near one
    would lose digits.
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
    """Return 1 - exp(g). Near g = 0 a series is used, because the difference loses digits there."""
    b_series = -b_g * (1 + b_g * (0.5 + b_g * (1 / 6 + b_g * (1 / 24 + b_g / 120))))
    return tl.where(b_g > -0.1, b_series, 1.0 - exp(b_g))
