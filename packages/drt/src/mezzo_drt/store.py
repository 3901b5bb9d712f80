"""Where the host keeps the keys and values of chunks: its memory, or files in a folder."""

import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from mezzo_core.errors import UserError
from torch import Tensor

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Makes a tensor, whose values are anything, on the host."""
_MAPPED: dict[int, int] = {}
"""The process that mapped a file, by the address in memory."""


def in_memory(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor in pageable memory.

    Raises:
        UserError: if the host has not so much memory left, or this process may not have it.
    """
    needed, free = math.prod(sizes) * dtype.itemsize, available_memory()
    left = f"which has {free / 2**30:.1f} GiB left"
    if needed <= free:
        try:
            return torch.empty(*sizes, dtype=dtype, device="cpu")
        except RuntimeError:
            left = "beyond what this process may have (see ulimit -v)"
    raise UserError(
        f"offload needs {needed / 2**30:.1f} GiB more of the host's memory, {left}: "
        "give a folder for files by offload_to(folder)"
    )


def in_folder(folder: str | Path) -> Allocate:
    """Return what makes tensors in files of a folder.

    A file has no name and goes with its tensor, also if the process is killed. Its room on the disk
    is taken when it is made, so that writing it cannot fail.

    Raises:
        UserError: if the folder is missing or cannot be written; later, if the disk is full.
        TypeError: if it is no path.
    """
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder must be a path or None, got {type(folder).__name__}")
    folder = Path(folder)
    if not os.path.isdir(folder):  # noqa: PTH112, since `is_dir` raises for a name that is too long
        raise UserError(f"{folder} is no folder: offload_to needs one that is there")
    _in_file(folder, (1,), torch.int64)
    return partial(_in_file, folder)  # which can be pickled with the stack


def _in_file(folder: Path, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    num_bytes = math.prod(sizes) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(*sizes, dtype=dtype, device="cpu")
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)
            mapped = mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise UserError(
            f"{folder} cannot take {num_bytes / 2**30:.1f} GiB of offloaded chunks: "
            f"{error.strerror or error}"
        ) from error
    found = torch.frombuffer(mapped, dtype=dtype).view(*sizes)
    _MAPPED[found.data_ptr()] = os.getpid()
    weakref.finalize(mapped, _MAPPED.pop, found.data_ptr())
    return found


def check_process(part: Tensor) -> None:
    """Check that no other process may write what the tensor holds.

    A forked process shares the files, but not what the states know about the room in them.

    Raises:
        UserError: if it lies in a file that this process has from the one that forked it.
    """
    here = os.getpid()
    if _MAPPED.get(part.untyped_storage().data_ptr(), here) != here:
        raise UserError(
            "state has chunks in files of the process that forked this one, which may still write "
            "them: start a state here, or keep chunks in memory by offload_to(None)"
        )


def available_memory() -> float:
    """Return the bytes of memory that the host can still give; infinite if it does not say.

    Limits of a container are not seen.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else math.inf
