"""The exponential in the kernels of all packages."""

import triton
import triton.language as tl


@triton.jit
def exp(x):
    """Return e^x of a float32 x, with fewer instructions than tl.exp, which handles denormals."""
    return tl.exp2(1.4426950408889634 * x)
