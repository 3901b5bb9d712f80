"""Checks of arguments, shared by all ops and mixers."""

import sys
from typing import Any

import torch
from torch import Tensor, nn

FLOATING = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
"""The dtypes that ops accept. float8 is not among them, because torch has no arithmetic for it."""
_KINDS = {"": FLOATING, "int": (torch.int32, torch.int64), "int64": (torch.int64,)}


def check_floating(op: str, name: str, x: Any) -> None:
    """Raise a TypeError if x is not a tensor of one of the `FLOATING` dtypes."""
    check_dtype(op, name, x, "")


def check_dtype(op: str, name: str, x: Any, kind: str) -> None:
    """Raise a TypeError if x is no tensor of a kind: "int", "int64", or "" for floats."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{op}: {name} must be a tensor, got {type(x).__name__}")
    if x.dtype not in _KINDS[kind]:
        got, *allowed = (str(dtype).removeprefix("torch.") for dtype in (x.dtype, *_KINDS[kind]))
        words = " or ".join(allowed) if kind else f"floating-point ({', '.join(allowed)})"
        raise TypeError(f"{op}: {name} must be {words}, got {got}")


def check_number(op: str, name: str, value: Any, *, positive: bool = False) -> None:
    """Check that `value` is a finite number, and above 0 if `positive`.

    Raises:
        TypeError: if it is not an int or float; bools and tensors are refused.
        ValueError: if it is NaN or infinite, an int of 64 bits or more, or not above 0 although
            `positive` is set.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name} must be a number, got {type(value).__name__}")
    # A comparison and not math.isfinite, because torch.compile may pass the number as a symbol.
    is_finite = -sys.float_info.max <= value <= sys.float_info.max
    if not is_finite or (positive and value <= 0):
        raise ValueError(
            f"{op}: {name} must be {'positive and ' if positive else ''}finite, got {value}"
        )
    if isinstance(value, int) and not -(2**63) <= value < 2**63:  # torch takes no larger ones
        raise ValueError(f"{op}: {name} must be a float beyond 2^63, got the int {value}")


def check_size(op: str, name: str, value: Any, least: int = 1) -> None:
    """Raise a TypeError if `value` is not an int or is a bool, a ValueError if below `least`."""
    # A tuple of types, because torch 2.8 cannot trace a union.
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{op}: {name} must be an int, got {type(value).__name__}")
    if value < least:
        raise ValueError(f"{op}: {name} must be {least} or more, got {value}")
    if isinstance(value, int) and value >= 2**63:
        raise ValueError(f"{op}: {name} must be less than 2^63")


def check_lengths(op: str, lengths: Any, x: Tensor, name: str = "lengths") -> None:
    """Check `lengths`, a number of tokens in each row of x (B, T, ...).

    Values are checked on a CPU only: reading them would wait for a GPU or break a compiled graph.

    Raises:
        TypeError: if it is not an int64 tensor.
        ValueError: if it is not (B,) on x's device, or a length is not from 0 to T.
    """
    check_dtype(op, name, lengths, "int64")
    if lengths.shape != x.shape[:1] or lengths.device != x.device:
        raise ValueError(
            f"{op}: {name} must be ({x.shape[0]},) on {x.device}, "
            f"got {tuple(lengths.shape)} on {lengths.device}"
        )
    check_counts(op, name, lengths, "T", x.shape[1])


def check_counts(
    op: str, name: str, counts: Tensor, symbol: str = "", most: int | None = None
) -> None:
    """Check the values, on a CPU only: reading them would wait for a GPU or break a compiled graph.

    Raises:
        ValueError: if one is below 0 or above `most`, which the message calls `symbol`.
    """
    if not is_read(counts) or counts.numel() == 0:
        return
    low, high = (int(end) for end in counts.aminmax())  # `tolist` fails in torch.func of torch 2.8
    if low < 0 or (most is not None and high > most):
        allowed = "0 or more" if most is None else f"from 0 to {symbol} = {most}"
        raise ValueError(f"{op}: {name} must be {allowed}, got {low if low < 0 else high}")


def check_no_gradients(
    op: str, *inputs: Tensor | None, because: str = "overwrites the state"
) -> None:
    """Raise a RuntimeError if a gradient would be needed."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError(
            f"{op} {because}, so it has no gradients: "
            "call it under torch.inference_mode() or torch.no_grad()"
        )


def is_read(x: Tensor) -> bool:
    """Tell whether checks may read the values of x: on a CPU, and not while compiling.

    Reading would wait for a GPU or break a graph. Fake tensors and those under torch.vmap have no
    values to read.
    """
    if x.device.type != "cpu" or torch.compiler.is_compiling() or type(x) is not Tensor:
        return False
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):  # torch.func.grad may wrap one of vmap
        if functorch.is_batchedtensor(x):
            return False
        x = functorch.get_unwrapped(x)
    return True


def in_transform() -> bool:
    """Tell whether a transform of torch.func (grad, vmap) is active: values cannot be read then."""
    return torch._C._are_functorch_transforms_active()


def can_look(*tensors: Tensor) -> bool:
    """Tell whether code may branch on values: in eager code, of plain tensors on a CPU.

    As `is_read`, but never under torch.func.
    """
    if torch.compiler.is_compiling() or in_transform():
        return False
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type == "cpu" for x in tensors)
