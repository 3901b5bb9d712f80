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
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
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
    compute = InterpreterBuilder.binary_op

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

    def binary_op(self: Any, a: Any, b: Any, function: Any) -> Any:
        out = compute(self, a, b, function)
        if out.data.dtype == bool:
            out.dtype = tl.int1
        return out

    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = create_dot, cast_impl
    InterpreterBuilder.binary_op = binary_op
    InterpreterBuilder.create_maxnumf = lambda self, a, b: self.binary_op(a, b, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, a, b: self.binary_op(a, b, np.fmin)


def speed_up_interpreter() -> None:
    """Let the interpreter do once what it repeats, so that kernels take less time.

    Each launch and each call of a device function patches `triton.language` with the interpreter's
    functions, and since Triton 3.6 takes the patch back. Here only the first call into a module
    patches it, and the patch stays. The table of numpy's types is made once, not at each look-up.
    Triton computes sums, differences and products of integers twice, to assert that none overflows;
    here it does so only with the option `debug`, without which the interpreter ignores assertions.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    _keep_types()
    _keep_operators()
    _look_less()
    patch = interpreter._patch_lang
    assert_no_overflow = TritonSemantic.binary_op_sanitize_overflow_impl
    look_up = interpreter._get_np_dtype
    of_scalar = functools.cache(look_up)
    patched: set[str] = set()  # modules with functions that were called
    staying = SimpleNamespace(restore=lambda: None)  # a launch ends with `restore`

    def patch_once(fn: Any) -> Any:
        if fn.__module__ not in patched:
            patched.add(fn.__module__)
            patch(fn)
        return staying

    def get_np_dtype(kind: Any) -> Any:
        return of_scalar(kind) if type(kind) is tl.dtype else look_up(kind)

    def assert_no_overflow_if_heeded(self: Any, *operation: Any) -> None:
        if self.builder.options.debug:
            assert_no_overflow(self, *operation)

    TritonSemantic.binary_op_sanitize_overflow_impl = assert_no_overflow_if_heeded
    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, get_np_dtype


def _keep_types() -> None:
    """Make each type of blocks once, and the fields that a tensor takes from its type.

    Every operation would make them anew, which takes longer than its arithmetic. Two tensors of one
    type or shape need no broadcasting.
    """
    import triton.language as tl
    from triton.language.semantic import TritonSemantic

    make_block, make_tensor = tl.block_type.__init__, tl.tensor.__init__
    broadcast = TritonSemantic.broadcast_impl_value
    blocks: dict[str, Any] = {}
    changed: dict[str, Any] = {}  # blocks of another element, by the names of both

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

    def broadcast_of_two_shapes(self: Any, lhs: Any, rhs: Any) -> Any:
        blocks = lhs.type.is_block() and rhs.type.is_block()
        if (blocks and lhs.handle.data.shape == rhs.handle.data.shape) or lhs.type is rhs.type:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        key = f"{self.name} {scalar_ty.name}"
        if key not in changed:
            changed[key] = tl.block_type(scalar_ty, self.shape)
        return changed[key]

    tl.block_type.__new__, tl.block_type.__init__ = staticmethod(new_block), init_block
    tl.block_type.with_element_ty, tl.tensor.__init__ = with_element_ty, init_tensor
    TritonSemantic.broadcast_impl_value = broadcast_of_two_shapes


def _look_less() -> None:
    """Do not look for constants in plain values, nor check the size of a tensor's numbers."""
    from triton.language import core
    from triton.runtime.interpreter import TensorHandle

    unwrap, plain = core._unwrap_if_constexpr, (core.tensor, core.dtype, int, float, type(None))

    def unwrap_if_constexpr(x: Any) -> Any:
        return x if type(x) in plain else unwrap(x)

    core._unwrap_if_constexpr = unwrap_if_constexpr
    TensorHandle.__post_init__ = lambda handle: None


def _keep_operators() -> None:
    """Find once what an operator does: it depends on the types of its operands and on numbers.

    Triton's finds the common type at each call, and broadcasts both operands, as numpy does anyway.
    Ours does what is left: casts, and one call of the interpreter.
    """
    import triton.language as tl

    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor"):
        for reflected in (False, True):
            full_name = f"__{'r' * reflected}{name}__"
            setattr(tl.tensor, full_name, _kept(getattr(tl.tensor, full_name), reflected))
    for name in ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__"):
        setattr(tl.tensor, name, _kept(getattr(tl.tensor, name), reflected=False))


def _kept(operator: Any, reflected: bool) -> Any:
    """Return an operator of tensors that keeps what `operator` does with each pair of types."""
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_semantic as semantic

    known: dict[Any, Any] = {}

    def handle_of(x: Any, becomes: Any) -> Any:
        if type(x) is not tl.tensor:
            return becomes.handle
        return (x if x.dtype.name == becomes.dtype.name else semantic.cast(x, becomes.dtype)).handle

    def apply(self: Any, other: Any) -> Any:
        other = other.value if type(other) is tl.constexpr else other  # Triton 3.4's has no hash
        kinds = (
            self.type.name,
            other.type.name if type(other) is tl.tensor else (type(other), other),
        )
        if kinds not in known:
            out, known[kinds] = _watched(operator, self, other)
            return out
        if known[kinds] is None:
            return operator(self, other, _semantic=semantic)
        call, rest, left, right, result = known[kinds]
        lhs, rhs = (other, self) if reflected else (self, other)
        return tl.tensor(call(handle_of(lhs, left), handle_of(rhs, right), *rest), result)

    return apply


def _watched(operator: Any, self: Any, other: Any) -> tuple[Any, Any]:
    """Run an operator of tensors.

    Returns:
        Its result, and what repeats it: the interpreter's method that made it, the method's further
        arguments, both operands as the method got them, and the result's type. The latter is None
        if the operator did more than this one call.
    """
    from triton.runtime.interpreter import interpreter_builder as builder
    from triton.runtime.interpreter import interpreter_semantic as semantic

    with (
        _noted(semantic, "binary_op_type_checking_impl") as matches,
        _noted(builder, "binary_op", "create_addptr", "create_idiv") as calls,
    ):
        out = operator(self, other, _semantic=semantic)
    if len(matches) == len(calls) == 1:
        (left, right), (name, (lhs, rhs, *rest), made) = matches[0][-1], calls[0]
        if left.handle is lhs and right.handle is rhs and out.handle is made:
            return out, (getattr(builder, name), rest, left, right, out.type)
    return out, None


@contextmanager
def _noted(owner: Any, *names: str) -> Iterator[list[tuple[str, tuple[Any, ...], Any]]]:
    """Yield a list of the calls of an object's methods: name, arguments by place, and result."""
    calls: list[tuple[str, tuple[Any, ...], Any]] = []

    def noting(name: str) -> Any:
        def call(*inputs: Any, **named: Any) -> Any:
            calls.append((name, inputs, getattr(type(owner), name)(owner, *inputs, **named)))
            return calls[-1][-1]

        return call

    vars(owner).update({name: noting(name) for name in names})
    try:
        yield calls
    finally:
        for name in names:
            vars(owner).pop(name, None)  # one call inside another has removed it


def _rounded(x: np.ndarray) -> np.ndarray:
    """Return the bits of x rounded to bfloat16, ties to even."""
    bits = x.view(np.uint32)
    nearest = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    return np.where(np.isnan(x), 0x7FC0, nearest).astype(np.uint16)
