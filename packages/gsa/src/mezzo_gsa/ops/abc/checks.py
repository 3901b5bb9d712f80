"""Checks of ABC's state."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from mezzo_gsa.ops.abc.state import ABCState


def check_parts(
    check: Callable[..., None],
    op: str,
    name: str,
    state: Any,
    k: Tensor,
    v: Tensor,
    s: Tensor,
    num_states: int | None = None,
) -> None:
    """Check each tensor of a state by `check`, of `mezzo_gsa.ops.decoding.checks`.

    Args:
        check: called with the op, the tensor's name, the tensor, its right shape, and k.
        op: the op's name, for messages.
        name: the state's name in messages.
        state: the state.
        k: (..., H, K).
        v: (..., H, V).
        s: (..., H, M).
        num_states: S; None: as many as k has rows.

    Raises:
        TypeError: if the state is no `ABCState`, or as `check` does.
        ValueError: as `check` does.
    """
    if not isinstance(state, ABCState):
        raise TypeError(f"{op}: {name} must be an ABCState, got {type(state).__name__}")
    slots = (k.shape[0] if num_states is None else num_states, *s.shape[-2:])
    shapes = ((*slots, k.shape[-1]), (*slots, v.shape[-1]), slots)
    for part, x, shape in zip(ABCState._fields, state, shapes, strict=True):
        check(op, f"{name}.{part}", x, shape, k)
