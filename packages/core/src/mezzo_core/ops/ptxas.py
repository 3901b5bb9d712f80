"""Chooses the assembler (ptxas) that turns Triton's kernels into machine code on Hopper.

For Hopper, Triton 3.6 and 3.7 use ptxas 12.8. It miscompiles some kernels with several matrix
products: a lost register leads to wrong numbers or illegal addresses. These versions of Triton also
contain a newer ptxas for Blackwell, which compiles such kernels correctly. Triton itself has used
it for Hopper since September 2026 (its pull request 11854).
"""

import os

import torch

OLDEST = (12, 9)
"""The first version known to compile correctly."""


def require_ptxas() -> None:
    """Make Triton use a correct ptxas on a Hopper GPU. Call it before kernels are compiled.

    It sets `triton.knobs.nvidia.ptxas`, for all kernels of the process, unless the user has set
    TRITON_PTXAS_PATH.

    Raises:
        RuntimeError: if there is no correct ptxas, or the user's is too old.
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
