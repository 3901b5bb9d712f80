"""Corrects errors of Triton's interpreter, so that it computes what a GPU would.

The interpreter stores the bits of bfloat16 in integers. Its matrix products multiply these integers
instead of the numbers, and its casts to bfloat16 truncate instead of rounding. A comparison of
integers also gets an integer type: broadcast from one number to a block, it becomes a block of
integers, which Triton 3.9 does not accept as a mask.
"""

from typing import Any

import numpy as np


def repair_interpreter() -> None:
    """Correct matrix products and casts of bfloat16, and masks from a comparison of two numbers.

    Elementwise arithmetic in bfloat16 stays wrong, so kernels must cast to float32 first.
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
    """Return the bits of x rounded to bfloat16, ties to even."""
    bits = x.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)
