"""Corrects errors of Triton's interpreter, and makes it faster.

Tests that run kernels on a CPU call both functions first.

The interpreter stores the bits of bfloat16 in integers. Its matrix products multiply these integers
instead of the numbers, and its casts to bfloat16 truncate instead of rounding. Its products in TF32
use all digits of float32, where a GPU cuts the last 13 bits off. A comparison of integers also gets
an integer type: broadcast from one number to a block, it becomes a block of integers, which Triton
3.9 does not accept as a mask. And until Triton 3.8 the larger of a number and a NaN was the NaN,
where a GPU takes the number.
"""

import functools
from typing import Any

import numpy as np

TF32 = np.uint32(0xFFFFE000)
"""The bits of a float32 number that products in TF32 read."""


def repair_interpreter() -> None:
    """Correct products of bfloat16 and in TF32, casts, masks from two numbers, maxima with a NaN.

    Elementwise arithmetic in bfloat16 stays wrong, so kernels must cast to float32 first.
    """
    import triton.language as tl
    from triton._C.libtriton import ir
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    multiply, cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl
    spread = InterpreterBuilder.create_splat

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def shortened(x: Any) -> Any:
        if x.dtype.scalar != tl.float32:
            return x
        return TensorHandle((x.data.view(np.uint32) & TF32).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if precision == ir.INPUT_PRECISION.TF32:
            a, b = shortened(a), shortened(b)
        return multiply(self, widened(a), widened(b), d, precision, *rest)

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
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def speed_up_interpreter() -> None:
    """Let the interpreter do once what it repeats, so that kernels take less time.

    A launch replaces the functions of `triton.language` by those of the interpreter. So does each
    call of a device function: here only the first call that a launch makes into a module does. The
    table of numpy's types, made anew at each look-up, is kept. Sums, differences and products of
    integers are computed a second time, to assert that none overflows, only where the interpreter
    heeds such assertions: not unless its option `debug` is set.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    _keep_types()
    _keep_matches()
    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    assert_no_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
    look_up = interpreter._get_np_dtype
    of_scalar = functools.cache(look_up)
    patched: set[str] = set()  # modules with functions that the launch under way called

    def patch_once(fn: Any) -> Any:
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            return patch(fn)

    def launch_patching_once(self: Any, *arguments: Any, **named: Any) -> None:
        patched.clear()  # the launch before took its patches back
        launch(self, *arguments, **named)

    def get_np_dtype(kind: Any) -> Any:
        return of_scalar(kind) if type(kind) is tl.dtype else look_up(kind)

    def assert_no_overflow_if_heeded(self: Any, *operation: Any) -> None:
        if self.builder.options.debug:
            assert_no_overflow(self, *operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = assert_no_overflow_if_heeded
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, get_np_dtype
    interpreter.GridExecutor.__call__ = launch_patching_once


def _keep_types() -> None:
    """Make each type of blocks once, and what a tensor takes from its type once for each type.

    Every operation makes both anew, which takes longer than its arithmetic. Two tensors of one type
    need no broadcasting.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    blocks: dict[str, Any] = {}

    def name_of(element_ty: Any, shape: Any) -> str:
        sizes = [size.value if isinstance(size, tl.constexpr) else size for size in shape]
        return f"{sizes} {element_ty}"

    def new_block(cls: Any, element_ty: Any, shape: Any) -> Any:
        return blocks.get(name_of(element_ty, shape)) or object.__new__(cls)

    def init_block(self: Any, element_ty: Any, shape: Any) -> None:
        if not vars(self):
            make_block(self, element_ty, shape)
            blocks[name_of(element_ty, shape)] = self

    def init_tensor(self: Any, handle: Any, type: Any) -> None:
        known = vars(type).get("known_to_tensors")
        if known is None:
            make_tensor(self, handle, type)
            type.known_to_tensors = {name: x for name, x in vars(self).items() if name != "handle"}
        else:
            vars(self).update(known, handle=handle)

    def broadcast_of_two_types(self: Any, lhs: Any, rhs: Any) -> Any:
        return (lhs, rhs) if lhs.type is rhs.type else broadcast(self, lhs, rhs)

    tl.block_type.__new__, tl.block_type.__init__ = staticmethod(new_block), init_block
    tl.tensor.__init__ = init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_of_two_types


def _keep_matches() -> None:
    """Find once which types two operands are cast to: it depends on their types and on numbers.

    Every operation finds it anew, though mostly neither is cast.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    match = TritonSemantic.binary_op_type_checking_impl
    known: dict[Any, Any] = {}

    def kind_of(x: Any) -> Any:
        return x.dtype.name if type(x) is tl.tensor else (type(x), x)

    def converted(self: Any, x: Any, to: Any) -> Any:
        if type(x) is not tl.tensor:
            return self.scalar_constant(x, to)
        return x if x.dtype.name == to.name else self.cast(x, to)

    def match_as_before(self: Any, lhs: Any, rhs: Any, *options: Any, **named: Any) -> Any:
        kinds = kind_of(lhs), kind_of(rhs), options, *named.items()
        if kinds not in known:
            lhs, rhs = match(self, lhs, rhs, *options, **named)
            known[kinds] = lhs.dtype, rhs.dtype
            return lhs, rhs
        left, right = known[kinds]
        return self.broadcast_impl_value(converted(self, lhs, left), converted(self, rhs, right))

    TritonSemantic.binary_op_type_checking_impl = match_as_before


def _rounded(x: np.ndarray) -> np.ndarray:
    """Return the bits of x rounded to bfloat16, ties to even."""
    bits = x.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)
