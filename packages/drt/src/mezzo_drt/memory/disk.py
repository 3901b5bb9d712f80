"""Keeps the host's chunks in files of a folder."""

import math
import mmap
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

import torch
from mezzo_core.errors import UserError
from torch import Tensor

from mezzo_drt.memory.host import Allocate

_OWNERS: WeakKeyDictionary[torch.UntypedStorage, int] = WeakKeyDictionary()
"""The process that mapped a file, by the storage of its tensor."""


def in_folder(folder: str | Path) -> Allocate:
    """Return a function that allocates tensors in files of a folder.

    A file has no name and vanishes with its tensor, even if the process is killed. Its disk space
    is allocated at once, so writing it later cannot fail.

    Raises:
        UserError: if the folder is missing or cannot be written; later, if the disk is full.
        TypeError: if it is no path.
    """
    if not isinstance(folder, str | Path):
        raise TypeError(f"folder must be a path or None, got {type(folder).__name__}")
    if not os.path.isdir(folder):  # noqa: PTH112, since `is_dir` raises for a name that is too long
        raise UserError(f"{str(folder)!r} is no folder: offload_to needs one that is there")
    folder = Path(folder).absolute()  # the process may change its working directory
    _in_file(folder, (1,), torch.int64)
    return partial(_in_file, folder)  # a partial can be pickled with the stack


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
    _OWNERS[found.untyped_storage()] = os.getpid()
    return found


def check_process(part: Tensor) -> None:
    """Check that no other process may write the memory of a tensor.

    A forked process shares the files, but not the `Room`s that tell how far they are filled.

    Raises:
        UserError: if the tensor is in a file of the process that forked this one.
    """
    if torch.compiler.is_compiling():  # a compiled graph belongs to this process
        return
    here = os.getpid()
    if _OWNERS.get(part.untyped_storage(), here) != here:
        raise UserError(
            "state has chunks in files of the process that forked this one, which may still write "
            "them: start a state here, or keep chunks in memory by offload_to(None)"
        )
