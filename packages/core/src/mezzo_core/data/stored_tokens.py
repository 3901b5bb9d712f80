"""Tokens in a .npy file; each read fails if another program has changed the file."""

import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mezzo_core.errors import UserError
from mezzo_core.files import is_foreign


class StoredTokens:
    """A one-dimensional array in a file, indexed like one in memory, by an array of places.

    The file is read and not mapped into memory: a process that reads a map is killed (SIGBUS) as
    soon as another program cuts the file. This costs 0.3 ms for a batch of 32,768 tokens.
    """

    def __init__(self, path: Path) -> None:
        """Open the file, which stays open: it may be removed meanwhile.

        Raises:
            ValueError: if it is no .npy file of one axis, is cut off, or belongs to another user.
                numpy raises errors of other kinds too where the header is damaged.
        """
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._descriptor)
        with open(self._descriptor, "rb", closefd=False) as file:
            if is_foreign(os.fstat(file.fileno())):
                raise ValueError("it belongs to another user")
            if np.lib.format.read_magic(file) != (1, 0):
                raise ValueError("it is of another version")
            shape, _, self.dtype = np.lib.format.read_array_header_1_0(file)
            self._begin = file.tell()
        (self._length,) = shape
        self._opened = self._size_and_time()
        if self._opened[0] != self._begin + self._length * self.dtype.itemsize:
            raise ValueError("it is cut off, or has more than its tokens")

    def __len__(self) -> int:
        """Return the number of tokens."""
        return self._length

    def __getitem__(self, places: NDArray[np.int64]) -> NDArray[Any]:
        """Return the tokens at these places, an array of the same shape.

        Raises:
            UserError: if the file was changed since it was opened.
        """
        flat = places.reshape(-1)
        # Each run of neighbours is read at once.
        firsts = np.flatnonzero(np.diff(flat, prepend=flat[:1] - 2) != 1)
        counts = np.diff(firsts, append=len(flat))
        runs = zip(flat[firsts].tolist(), counts.tolist(), strict=True)
        return self._array(b"".join(self._bytes(*run) for run in runs)).reshape(places.shape)

    def read(self, first: int, count: int) -> NDArray[Any]:
        """Return `count` tokens from place `first` on; it raises what `__getitem__` does."""
        return self._array(self._bytes(first, count))

    def _bytes(self, first: int, count: int) -> bytes:
        size = self.dtype.itemsize
        return os.pread(self._descriptor, count * size, self._begin + first * size)

    def _array(self, found: bytes) -> NDArray[Any]:
        if self._size_and_time() != self._opened:
            raise UserError(
                f"another program changed {self._path} while it was read: run the same command "
                "again, which makes the tokens anew"
            )
        return np.frombuffer(found, self.dtype)

    def _size_and_time(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns
