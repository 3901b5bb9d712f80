"""Imports the names of a package at their first use (PEP 562).

So `mezzo-rat --help` does not wait for torch, which the layers of `mezzo_rat` need.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

Attached = tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]
"""A package's `__getattr__`, `__dir__` and `__all__`."""


def lazy_names(package: str, places: Mapping[str, Sequence[str]]) -> Attached:
    """Return functions that import a package's names and modules when they are first used.

    Args:
        package: the package's `__name__`.
        places: for each module of the package, the names that it defines.
    """
    modules = {name: module for module, names in places.items() for name in names}

    def get(name: str) -> Any:
        if name in modules:
            value = getattr(import_module(f"{package}.{modules[name]}"), name)
            setattr(sys.modules[package], name, value)
            return value
        if not name.startswith("__") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *modules})

    return get, names, list(modules)
