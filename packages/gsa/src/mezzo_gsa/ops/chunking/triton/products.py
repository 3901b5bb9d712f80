"""Functions of kernels for products over a chunk: running sums, precise factors, suffix sums."""

import triton
import triton.language as tl


@triton.jit
def load_running(p_running, o_l, m_m, length, stride):
    """Return G (L, BM) of the tokens o_l; padding, which does not decay, has the last token's G."""
    o_l = tl.maximum(tl.minimum(o_l, length - 1), 0)
    return tl.load(p_running + o_l[:, None] * stride, mask=m_m[None, :] & (length > 0), other=0.0)


@triton.jit
def dot_wide(b_a, b_x, PRECISION: tl.constexpr):
    """Multiply b_a with float32 factors b_x, by two products: of their high bits and of the rest.

    The gradients of gates and of a softmax need it: they are small differences of products.
    """
    if b_a.dtype == tl.float32:
        return tl.dot(b_a, b_x, input_precision=PRECISION)
    b_high = b_x.to(b_a.dtype)
    b_y = tl.dot(b_a, b_high, input_precision=PRECISION)
    return tl.dot(b_a, (b_x - b_high).to(b_a.dtype), b_y, input_precision=PRECISION)


@triton.jit
def suffix_sum(b_x, L: tl.constexpr, PRECISION: tl.constexpr):
    """Return for each row the sum of it and all rows after it, (L, BM)."""
    if PRECISION == "ieee":
        return tl.sum(b_x, 0)[None, :] - tl.cumsum(b_x, 0) + b_x
    o_l = tl.arange(0, L)  # a scan takes longer than two products with ones
    b_ones = tl.where(o_l[:, None] <= o_l[None, :], 1.0, 0.0).to(tl.bfloat16)
    return dot_wide(b_ones, b_x, PRECISION)
