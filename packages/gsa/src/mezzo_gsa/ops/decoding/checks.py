"""Checks of heads, of states, and of decoding in place, for all ops of the family."""

from collections.abc import Callable, Sequence
from typing import Any

from mezzo_core.ops.checks import check_floating, check_number
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.shapes import Shapes, check_heads, check_one_dtype
from torch import Tensor


def check_state(op: str, name: str, state: Any, shape: tuple[int, ...], x: Tensor) -> None:
    """Raise a ValueError or TypeError if a tensor of a state does not fit `shape`, or input x."""
    check_floating(op, name, state)
    if state.shape != shape or state.device != x.device:
        raise ValueError(
            f"{op}: {name} must be {tuple(shape)} on {x.device}, "
            f"got {tuple(state.shape)} on {state.device}"
        )


def check_memory(op: str, name: str, memory: Any, shape: tuple[int, ...], x: Tensor) -> None:
    """Check a tensor of a state to be overwritten, which must have the dtype of accumulation."""
    check_state(op, name, memory, shape, x)
    dtype = accumulation_dtype(x.dtype)
    if memory.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {memory.dtype}")


def check_kind(op: str, name: str, state: Any, kind: type[Any]) -> None:
    """Raise a TypeError unless a state is a named tuple of this kind."""
    if not isinstance(state, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        got = type(state).__name__
        raise TypeError(f"{op}: {name} must be {article} {kind.__name__}, got {got}")


def check_parts(
    op: str,
    name: str,
    state: Any,
    kind: type[Any],
    shapes: Sequence[tuple[int, ...]],
    x: Tensor,
    check: Callable[..., None] = check_state,
) -> None:
    """Check the kind of a state, and each of its tensors by `check`, against input x."""
    check_kind(op, name, state, kind)
    for field, part, shape in zip(kind._fields, state, shapes, strict=True):
        check(op, f"{name}.{field}", part, shape, x)


def head_shapes(**gates: str) -> dict[str, Shapes]:
    """Return the shapes of q, k, v and what each head gets beside them, by the axes of q.

    The axes are "(B, T, HQ, K)", and in a step "(B, HQ, K)".
    """
    found = {}
    for axes in ("B T", "B"):
        shapes = {"q": "HQ K", "k": "H K", "v": "H V", **gates}
        named = {name: f"{axes} {shape}" for name, shape in shapes.items()}
        found[f"({', '.join((*axes.split(), 'HQ', 'K'))})"] = Shapes(**named, filled="HQ H K V M")
    return found


def check_inputs(
    op: str, shapes: Shapes, q: Tensor, k: Tensor, v: Tensor, *gates: Tensor | None, scale: Any
) -> None:
    """Raise a ValueError or TypeError that names the argument that does not fit."""
    shapes.check(op, q, k, v, *gates)
    check_one_dtype(op, q=q, k=k, v=v)
    check_heads(op, q.shape[-2], k.shape[-2])
    check_number(op, "scale", scale)
