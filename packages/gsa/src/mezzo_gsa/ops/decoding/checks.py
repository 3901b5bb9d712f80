"""Checks of heads, of states, and of decoding in place, for all ops of the family."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mezzo_core.ops.checks import check_floating, check_number
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor


def check_no_gradients(
    op: str, *inputs: Tensor | None, because: str = "overwrites the state"
) -> None:
    """Raise a RuntimeError if a gradient would be needed."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError(
            f"{op} {because}, so it has no gradients: "
            "call it under torch.inference_mode() or torch.no_grad()"
        )


def check_state(op: str, name: str, state: Any, shape: tuple[int, ...], x: Tensor) -> None:
    """Raise a ValueError or TypeError if a tensor of a state does not fit `shape`, or input x."""
    check_floating(op, name, state)
    if state.shape != shape or state.device != x.device:
        raise ValueError(
            f"{op}: {name} must be {tuple(shape)} on {x.device}, "
            f"got {tuple(state.shape)} on {state.device}"
        )


def check_memory(op: str, name: str, memory: Any, shape: tuple[int, ...], x: Tensor) -> None:
    """Check a tensor of a state that is overwritten; its dtype must be that of accumulation."""
    check_state(op, name, memory, shape, x)
    dtype = accumulation_dtype(x.dtype)
    if memory.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {memory.dtype}")


def check_kind(op: str, name: str, state: Any, kind: type[Any]) -> None:
    """Raise a TypeError unless a state is a named tuple of this kind, of floating-point tensors."""
    if not isinstance(state, kind):
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        got = type(state).__name__
        raise TypeError(f"{op}: {name} must be {article} {kind.__name__}, got {got}")
    for field, part in zip(kind._fields, state, strict=True):
        check_floating(op, f"{name}.{field}", part)


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


def check_heads(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    others: Mapping[str, Tensor],
    scale: float,
    *,
    sizes: str,
) -> None:
    """Raise a ValueError or TypeError that names the argument which does not fit the others.

    `sizes` names the axes of q in messages. k, v and `others`, by their names, share all of these
    but the last two, and have as many heads as k, which divide those of q.
    """
    named = {"q": q, "k": k, "v": v, **others}
    for name, x in named.items():
        check_floating(op, name, x)
    check_number(op, "scale", scale)
    if q.ndim != sizes.count(",") + 1:
        raise ValueError(f"{op}: q must be {sizes}, got {tuple(q.shape)}")
    *axes, HQ, K = q.shape
    H = k.shape[-2] if k.ndim == q.ndim else 0
    if not H or not HQ or HQ % H or k.shape != (*axes, H, K):
        raise ValueError(
            f"{op}: k must be ({_listed(axes)}, H, {K}) with H a divisor of {HQ}, "
            f"got {tuple(k.shape)}"
        )
    for name, x in named.items():
        if name not in ("q", "k") and (x.ndim != q.ndim or x.shape[:-1] != k.shape[:-1]):
            width = "V" if name == "v" else "..."
            raise ValueError(
                f"{op}: {name} must be ({_listed(axes)}, {H}, {width}), got {tuple(x.shape)}"
            )
        if x.device != q.device:
            raise ValueError(f"{op}: {name} is on {x.device}, q on {q.device}")
        if not x.shape[-1]:
            raise ValueError(f"{op}: the last size of {name} must not be 0: {tuple(x.shape)}")
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            raise TypeError(f"{op}: {name} must have the dtype of q, {q.dtype}, got {x.dtype}")


def _listed(axes: Sequence[int]) -> str:
    return ", ".join(map(str, axes))  # for messages only: torch.compile cannot trace str(size)
