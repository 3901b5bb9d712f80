"""Triton's interpreter made to do what GPUs do, where it does not as it comes.

It holds the bits of bfloat16 in integers: it multiplies matrices of these integers, and casts cut
off what they should round. Comparisons of integers bear the integers' type there, so one number
compared and spread over a block becomes a block of integers, which Triton 3.9 refuses as a mask.
"""

from typing import Any

import numpy as np


def repair_interpreter() -> None:
    """Repair products of bfloat16, casts to and from it, and masks that one comparison makes.

    Arithmetic on elements of bfloat16 stays wrong: a kernel casts them to float32 first.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    spread = InterpreterBuilder.create_splat

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return multiply(self, widened(a), widened(b), *rest)

    def cast_impl(self: Any, x: Any, to: Any) -> Any:
        pair = x.dtype.scalar, to.scalar
        if pair == (tl.float32, tl.bfloat16):
            return TensorHandle(_rounded(x.data), tl.bfloat16)
        return widened(x) if pair == (tl.bfloat16, tl.float32) else cast(self, x, to)

    def create_splat(self: Any, kind: Any, x: Any) -> Any:
        block = spread(self, kind, x)
        return TensorHandle(block.data.astype(bool), tl.int1) if x.data.dtype == bool else block

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.create_splat = create_splat


def _rounded(x: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, of two as near the even one."""
    bits = x.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)
