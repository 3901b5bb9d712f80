"""Frozen dataclasses to plain JSON and back: how a configuration is stored beside its weights.

Every dataclass becomes an object with a "type" of "module:ClassName" and one entry a field; tuples
become lists and paths strings. Reading never runs code that the file names freely: a type must be a
frozen dataclass of an allowed package, and every value must fit the field's annotation.
"""

import importlib
import sys
import types
import typing
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from mezzo_core.errors import UserError, nearest

ALLOWED_PACKAGES = ("mezzo_",)
_SCALARS = (bool, int, float, str, type(None))


def to_json(config: Any) -> dict[str, Any]:
    """Turn a frozen dataclass into a dict that `json.dumps` accepts and `from_json` reads back.

    Raises:
        TypeError: if `config`, or a value in it, is none of: a frozen dataclass defined at the top
            of a module, a tuple, a path, a string, a number, a bool, None.
    """
    cls = type(config)
    if not _is_frozen_dataclass(cls):
        raise TypeError(f"config must be a frozen dataclass, got {cls.__name__}")
    if "." in cls.__qualname__:
        raise TypeError(f"{cls.__qualname__} must be defined at the top of its module to be stored")
    if any(field.name == "type" for field in fields(config)):
        raise TypeError(f'{cls.__name__} has a field "type", which names the class in the JSON')
    values = {
        f.name: _encode(getattr(config, f.name), f"{cls.__name__}.{f.name}")
        for f in _init_fields(cls)
    }
    return {"type": f"{cls.__module__}:{cls.__name__}", **values}


def from_json(data: Any, allow_packages: Sequence[str] = ALLOWED_PACKAGES) -> Any:
    """Build the dataclass that `to_json` wrote.

    Args:
        data: the parsed JSON.
        allow_packages: packages whose classes may be built; a name that ends in "_" allows every
            package that starts with it.

    Raises:
        UserError: if a type is unknown or not allowed, a field is unknown, missing or of another
            type, or the class refuses the values.
    """
    return _decode_dataclass(data, "config", tuple(allow_packages))


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    raise TypeError(f"{where} cannot be stored as JSON: {type(value).__name__} {value!r}")


def _decode_dataclass(data: Any, where: str, allow: tuple[str, ...]) -> Any:
    if not isinstance(data, dict) or not isinstance(data.get("type"), str):
        raise UserError(f'{where} must be an object with a "type", got {_short(data)}')
    cls = _find_class(data["type"], where, allow)
    hints = typing.get_type_hints(cls)
    known = {field.name: field for field in _init_fields(cls)}
    values = {}
    for name, value in data.items():
        if name == "type":
            continue
        if name not in known:
            raise UserError(f"{where}: {cls.__name__} has no field {name!r}{nearest(name, known)}")
        values[name] = _decode(value, hints[name], f"{where}.{name}", allow)
    missing = [name for name, field in known.items() if name not in values and _required(field)]
    if missing:
        raise UserError(f"{where}: {cls.__name__} needs {', '.join(missing)}")
    try:
        return cls(**values)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: {cls.__name__} refuses its values: {error}") from error


def _find_class(name: str, where: str, allow: tuple[str, ...]) -> type:
    """Import the class that `name`, "module:ClassName", stands for."""
    module_name, _, class_name = name.partition(":")
    if not any(_in_package(module_name, package) for package in allow):
        raise UserError(
            f"{where}: type {name!r} is not from an allowed package ({', '.join(allow)})"
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        loaded = [m for m in sys.modules if any(_in_package(m, package) for package in allow)]
        hint = nearest(module_name, get_close_matches(module_name, loaded))
        raise UserError(f"{where}: cannot import {module_name!r} ({error}){hint}") from error
    cls = getattr(module, class_name, None)
    if not _is_frozen_dataclass(cls):
        classes = [n for n, value in vars(module).items() if _is_frozen_dataclass(value)]
        hint = nearest(class_name, classes)
        raise UserError(f"{where}: {module_name} has no frozen dataclass {class_name!r}{hint}")
    return typing.cast(type, cls)


def _decode(value: Any, hint: Any, where: str, allow: tuple[str, ...]) -> Any:
    """Turn a JSON value into what the annotation `hint` says, or raise a UserError."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        hint = tuple if isinstance(value, list) else type(value)
    if origin in (typing.Union, types.UnionType):
        return _decode_union(value, args, where, allow)
    if origin is Literal:
        if value not in args:
            raise UserError(f"{where} must be one of {args}, got {_short(value)}")
        return value
    if hint is tuple or origin is tuple:
        return _decode_tuple(value, args, where, allow)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and type(value) is int:
        return float(value)
    if hint in _SCALARS:  # bool is an int to Python, and a mistake here
        if type(value) is not hint:
            raise UserError(f"{where} must be {hint.__name__}, got {_short(value)}")
        return value
    if isinstance(value, dict):
        config = _decode_dataclass(value, where, allow)
        if _is_frozen_dataclass(hint) and not isinstance(config, hint):
            raise UserError(f"{where} must be {hint.__name__}, got {type(config).__name__}")
        return config
    raise UserError(f"{where} must be {getattr(hint, '__name__', hint)}, got {_short(value)}")


def _decode_union(value: Any, args: tuple[Any, ...], where: str, allow: tuple[str, ...]) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    errors = []
    # An exact type first, so that 1 stays an int for `float | int`.
    for choice in sorted(choices, key=lambda arg: type(value) is not arg):
        try:
            return _decode(value, choice, where, allow)
        except UserError as error:
            errors.append(str(error))
    raise UserError("; or ".join(errors))


def _decode_tuple(value: Any, args: tuple[Any, ...], where: str, allow: tuple[str, ...]) -> Any:
    if not isinstance(value, list):
        raise UserError(f"{where} must be a list, got {_short(value)}")
    if not args:
        hints: Sequence[Any] = [Any] * len(value)
    elif args[-1] is Ellipsis:
        hints = [args[0]] * len(value)
    elif len(args) == len(value):
        hints = args
    else:
        raise UserError(f"{where} must have {len(args)} items, got {len(value)}")
    return tuple(
        _decode(item, hint, f"{where}[{i}]", allow)
        for i, (item, hint) in enumerate(zip(value, hints, strict=True))
    )


def _is_frozen_dataclass(cls: Any) -> bool:
    return isinstance(cls, type) and is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _init_fields(cls: type) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.init]


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _in_package(module: str, package: str) -> bool:
    if package.endswith("_"):
        return module.startswith(package)
    return module == package or module.startswith(f"{package}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
