"""What every decoding step in place asks of its inputs."""

import torch
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor


def check_no_gradients(op: str, *inputs: Tensor | None) -> None:
    """Raise a RuntimeError if a gradient would be needed."""
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs):
        raise RuntimeError(
            f"{op} overwrites the state, so it has no gradients: "
            "call it under torch.inference_mode() or torch.no_grad()"
        )


def check_memory(op: str, name: str, memory: Tensor, shape: tuple[int, ...], x: Tensor) -> None:
    """Raise a ValueError or TypeError if the state's `memory` does not fit `shape`, or input x."""
    if memory.shape != shape or memory.device != x.device:
        raise ValueError(
            f"{op}: {name} must be {shape} on {x.device}, "
            f"got {tuple(memory.shape)} on {memory.device}"
        )
    dtype = accumulation_dtype(x.dtype)
    if memory.dtype != dtype:
        raise TypeError(f"{op}: {name} must be {dtype}, got {memory.dtype}")
