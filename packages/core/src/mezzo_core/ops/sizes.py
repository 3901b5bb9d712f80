"""Sizes of tiles and grids.

Triton has the same functions, for kernels too, but they are slow: each call looks for constants
among its arguments. An op asks for dozens of sizes at each call.
"""


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is n or more; 1 for n = 0."""
    return 1 << max(n - 1, 0).bit_length()
