"""Reads .xz files whole, or fails.

`lzma.open` silently stops at data behind a stream that is not another stream: where a later stream
is damaged, and at the zeros that may stand between two of them.
"""

import io
import lzma
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

_BYTES = 1 << 16
"""Read and decompressed at a time."""


def open_xz(path: Path) -> io.BufferedReader:
    """Open a file of xz streams, one after another, to read what they hold.

    Raises:
        OSError: if it cannot be opened.
        lzma.LZMAError: in a later read, if it is damaged.
        EOFError: in a later read, if it ends within a stream.
    """
    return io.BufferedReader(_Pieces(path.open("rb")), _BYTES)


def _decompress(file: BinaryIO) -> Iterator[bytes]:
    data = file.read(_BYTES)
    while data:
        stream = lzma.LZMADecompressor()
        while not stream.eof:
            if stream.needs_input and not data and not (data := file.read(_BYTES)):
                raise EOFError("it ends within a compressed stream")
            yield stream.decompress(data, _BYTES)
            data = b""
        data = stream.unused_data.lstrip(b"\0")
        while not data and (following := file.read(_BYTES)):
            data = following.lstrip(b"\0")


class _Pieces(io.RawIOBase):
    """A file's decompressed bytes as a file."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._pieces, self._piece = file, _decompress(file), b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._piece:
            piece = next(self._pieces, None)
            if piece is None:
                return 0
            self._piece = piece
        count = min(len(buffer), len(self._piece))
        buffer[:count], self._piece = self._piece[:count], self._piece[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
