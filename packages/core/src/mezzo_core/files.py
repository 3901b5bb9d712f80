"""Small files: reading reports damage clearly, and writing never leaves a half-written file."""

import json
import os
import secrets
import shutil
import stat
import sys
from glob import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mezzo_core.errors import UserError

if TYPE_CHECKING:
    from filelock import AcquireReturnProxy, BaseFileLock

# Our JSON files are far smaller. A larger file is refused before it fills the memory.
_MOST_BYTES = 64 << 20


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        UserError: if it is missing, unreadable, too large or not UTF-8, or does not hold a JSON
            object (NaN and infinity, which Python would accept, are not JSON).
    """
    content = read_small(path)
    try:
        found = parse_json(content)
    except ValueError as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold a JSON object, got {type(found).__name__}")
    return found


def read_small(path: Path) -> bytes:
    """Read a file of at most 64 MiB.

    Raises:
        UserError: if it is missing, unreadable, too large, or no file.
    """
    try:
        mode, size = path.stat().st_mode, path.stat().st_size
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):  # a pipe may never end
            raise UserError(f"{path} cannot be read: it is a pipe or a device")
        if size > _MOST_BYTES:
            raise UserError(f"{path} cannot be read: {size:,} bytes are too many for such a file")
        return path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} is missing") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from error


def is_number(value: Any) -> bool:
    """Tell whether a JSON value is a number that a float can hold."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def parse_json(text: str | bytes) -> Any:
    """Parse JSON strictly by its standard.

    Raises:
        ValueError: if the text is not JSON. The message names the reason, such as text that is not
            UTF-8, values nested too deeply, numbers of thousands of digits, NaN or infinity.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"it is not UTF-8 text ({error.reason})") from None


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a kill at any moment leaves the old or the new file complete.

    The text is written to a new file beside `path`, which is then renamed. The new file's name is
    random, so that nobody can place a link there beforehand and redirect the text.

    Raises:
        OSError: if it cannot be written; no partial file is left.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    with scratch.open("x", encoding="utf-8") as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            scratch.replace(path)
        except BaseException:
            scratch.unlink(missing_ok=True)
            raise


def remove_scratch(path: Path) -> None:
    """Remove the temporary files that killed calls of `write_whole` left beside `path`.

    No process may be writing `path` at the same time.

    Raises:
        OSError: if one cannot be removed.
    """
    for left in path.parent.glob(f".{escape(path.name)}.{'[0-9a-f]' * 16}"):
        left.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Remove a file or a whole folder if it is there; of a link only the link, not its target.

    Raises:
        OSError: if it cannot be removed.
    """
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def is_foreign(status: os.stat_result) -> bool:
    """Tell whether a file or folder belongs to another user than this one and root."""
    ours = os.geteuid() if hasattr(os, "geteuid") else 0  # Windows says 0 for every file
    return status.st_uid not in (ours, 0)


def acquire(lock: "BaseFileLock") -> "AcquireReturnProxy":
    """Acquire a lock, for a `with` block that releases it.

    Raises:
        OSError: if the file system has no locks, as some network mounts, or by another error of the
            lock.
    """
    try:
        return lock.acquire()
    except NotImplementedError as error:  # from older versions of filelock, without a fallback
        raise OSError(str(error)) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
