"""The border to other libraries: import one where it is used, and put its errors into one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType

from mezzo_core.errors import UserError, printable

_LONGEST = 300


def import_library(name: str, extra: str) -> ModuleType:
    """Import a library of one of mezzo-core's extras.

    Args:
        name: the module; the message names the library that it is of.
        extra: the extra of mezzo-core that brings it.

    Raises:
        UserError: if it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"this needs the library {name.partition('.')[0]!r}: pip install 'mezzo-core[{extra}]'"
        ) from error


@contextmanager
def library_errors(failed: str) -> Iterator[None]:
    """Turn whatever a library raises on what it is given into the user's one line.

    Args:
        failed: what could not be done, as the message begins.

    Raises:
        UserError: for every error but a `UserError`, which passes as it is.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        # A panic of a library in Rust is no Exception, and its class has no name to import.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise UserError(f"{failed}: {first_line(error)}") from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its kind if there is none."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return printable(line if len(line) <= _LONGEST else f"{line[:_LONGEST]} ...")
