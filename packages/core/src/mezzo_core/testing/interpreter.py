"""Bfloat16 in Triton's interpreter, which holds its bits in integers.

As it comes, it multiplies matrices of these integers, and casts cut off what they should round.
"""

from typing import Any

import numpy as np


def repair_bfloat16() -> None:
    """Make the interpreter multiply matrices of bfloat16, and cast to and from it, as GPUs do.

    Arithmetic on elements stays wrong: a kernel casts them to float32 first.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl

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

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl


def _rounded(x: np.ndarray) -> np.ndarray:
    """Return the bits of the nearest bfloat16, of two as near the even one."""
    bits = x.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)
