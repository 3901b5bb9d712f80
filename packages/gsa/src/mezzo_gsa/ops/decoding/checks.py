"""Checks of states, and of decoding in place, for all ops of the family."""

from typing import Any

import torch
from mezzo_core.ops.checks import check_floating
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
