"""Which assembler turns Triton's kernels into machine code on Hopper.

Triton 3.6 and 3.7 take ptxas 12.8 for Hopper, which drops a register of some kernels that multiply
several times: wrong numbers, or addresses outside of memory. They also bring a newer one, for
Blackwell, which is right, and which Triton itself takes for Hopper since September 2026 (its pull
request 11854).
"""

import os

import torch

OLDEST = (12, 9)
"""The first version that is known to be right."""


def require_ptxas() -> None:
    """Make Triton use a right ptxas where the GPU is a Hopper; called before kernels compile.

    It sets `triton.knobs.nvidia.ptxas`, for all kernels of the process, unless the user has set
    TRITON_PTXAS_PATH.

    Raises:
        RuntimeError: if there is none, or the user's is too old.
    """
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return
    from triton import knobs

    old, newer = knobs.nvidia.ptxas, getattr(knobs.nvidia, "ptxas_blackwell", None)
    if _version(old.version) >= OLDEST:
        return
    if os.environ.get("TRITON_PTXAS_PATH") or not newer or _version(newer.version) < OLDEST:
        raise RuntimeError(
            f"ptxas {old.version} ({old.path}) compiles kernels wrong on Hopper; "
            "set TRITON_PTXAS_PATH to that of CUDA 12.9 or newer"
        )
    knobs.nvidia.ptxas = newer.path


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))
