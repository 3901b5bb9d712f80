"""Import an optional library where it is used, with a clear word when it is missing."""

from importlib import import_module
from types import ModuleType

from mezzo_core.errors import UserError


def import_library(name: str, extra: str) -> ModuleType:
    """Import a library of one of mezzo-core's extras.

    Args:
        name: the module, which is also what the message calls the library.
        extra: the extra of mezzo-core that brings it.

    Raises:
        UserError: if it is not installed.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise UserError(
            f"this needs the library {name!r}: pip install 'mezzo-core[{extra}]'"
        ) from error
