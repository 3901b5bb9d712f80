"""The choice between an op's implementations. An explicit choice is never silently changed."""

import os
from typing import Literal, get_args

import torch

Impl = Literal["auto", "reference", "triton"]


def triton_runs_on(device: torch.device) -> bool:
    """Tell whether Triton kernels can run: on a CUDA GPU, or on any device in the interpreter."""
    return device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"


def resolve_impl(op: str, impl: str, device: torch.device, unsupported: str | None = None) -> str:
    """Turn the caller's `impl` into "reference" or "triton".

    Args:
        op: the op's name, for messages.
        impl: "auto" takes Triton on a GPU that supports the request, else the reference.
        device: where the inputs are.
        unsupported: why the Triton kernels cannot do this request, or None if they can.

    Raises:
        ValueError: if `impl` is unknown, or is "triton" and Triton cannot do this request.
    """
    if not isinstance(impl, str) or impl not in get_args(Impl):
        raise ValueError(f"{op}: impl must be one of {get_args(Impl)}, got {impl!r}")
    if impl == "reference":
        return "reference"
    if impl == "auto":
        return "triton" if device.type == "cuda" and unsupported is None else "reference"
    if not triton_runs_on(device):
        raise ValueError(
            f'{op}: impl="triton" needs CUDA tensors, got tensors on {device}; '
            'impl="reference" runs there'
        )
    if unsupported is not None:
        raise ValueError(f'{op}: impl="triton" does not support {unsupported}')
    return "triton"
