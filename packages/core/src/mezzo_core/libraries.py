"""Imports optional libraries where they are used, and turns their errors into one line."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from mezzo_core.errors import UserError, printable

_LONGEST = 300


def import_library(name: str, extra: str, *, package: str = "mezzo-core") -> ModuleType:
    """Import the module `name`, which the extra `extra` of `package` installs.

    Raises:
        UserError: if it is not installed; the message says how to install it.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"this needs the library {name.partition('.')[0]!r}: pip install '{package}[{extra}]'"
        ) from error


@contextmanager
def library_errors(failed: str) -> Iterator[None]:
    """Turn any error of a library into a `UserError` of one line, "FAILED: ERROR".

    A `UserError` passes unchanged.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not _is_panic(error):
            raise
        raise UserError(f"{failed}: {first_line(error)}") from error


@contextmanager
def panics_unprinted() -> Iterator[None]:
    """Hide what Rust prints on standard error before Python gets its panic as an exception.

    All other output to standard error is delayed until the end, so use this for short work.
    """
    try:
        kept = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    with tempfile.TemporaryFile() as printed:
        os.dup2(printed.fileno(), 2)
        try:
            yield
        except BaseException as error:
            if _is_panic(error):
                printed.truncate(0)
            raise
        finally:
            os.dup2(kept, 2)
            printed.seek(0)
            os.write(2, printed.read())
            os.close(kept)


def _is_panic(error: BaseException) -> bool:
    # The panic of a Rust library is not an Exception, and its class cannot be imported.
    return type(error).__name__ == "PanicException"


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or the name of its class if it has none."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return printable(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")
