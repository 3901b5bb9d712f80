"""Converts frozen dataclasses to JSON and back, to store a configuration beside its weights.

Every dataclass becomes an object with a "type" of "module:ClassName" and one entry for each field.
Tuples become lists, and paths become strings. A file cannot make us run arbitrary code: a type must
be a frozen dataclass of an allowed package, and every value must fit its field's annotation.
"""

import importlib
import math
import re
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mezzo_core.errors import UserError, nearest

MARKER = "mezzo.package"
"""A package named mezzo_... has this empty file beside its `__init__.py` to say that any JSON file
may name its classes. The name alone is not enough, because anybody can publish such a package."""
_SCALARS = (bool, int, float, str, type(None))
_INFINITIES = {math.inf: "inf", -math.inf: "-inf"}
_TYPE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)


def to_json(config: Any) -> dict[str, Any]:
    """Turn a frozen dataclass into a dict for `json.dumps`, which `from_json` can read.

    Raises:
        TypeError: if `config` is not a frozen dataclass defined at the top level of a module, or
            has a value that is not such a dataclass, a tuple, a path, a string, a number, a bool
            or None.
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


def from_json(data: Any, allow_packages: Sequence[str] = ()) -> Any:
    """Build the dataclass that `to_json` wrote.

    Args:
        data: the parsed JSON.
        allow_packages: packages whose classes may be built, besides installed ones of mezzo (with
            a `MARKER`). They are imported from wherever Python finds them.

    Raises:
        UserError: if a type is unknown or not allowed; if a field is unknown, missing or of the
            wrong type; or if the class refuses the values.
    """
    try:
        return _decode_dataclass(data, "config", tuple(allow_packages))
    except RecursionError:
        raise UserError("config is nested too deeply") from None


def with_defaults(data: Any, config: Any) -> Any:
    """Add the defaults of later fields to what `to_json` wrote before these fields existed.

    Args:
        data: the parsed JSON.
        config: a configuration of the same structure, whose classes have the defaults.
    """
    if isinstance(config, tuple) and isinstance(data, list) and len(data) == len(config):
        return [with_defaults(*pair) for pair in zip(data, config, strict=True)]
    if not (is_dataclass(config) and isinstance(data, dict)):
        return data
    added = {
        f.name: f.default if f.default_factory is MISSING else f.default_factory()
        for f in _init_fields(type(config))
        if f.name not in data
    }
    known = {name: _encode(value, name) for name, value in added.items() if value is not MISSING}
    stored = {key: with_defaults(value, getattr(config, key, None)) for key, value in data.items()}
    return {**known, **stored}


def check_fields(config: Any) -> None:
    """Check that every field of a dataclass has the type of its annotation.

    An int is accepted for a float. Call it in `__post_init__`, before checking values.

    Raises:
        UserError: if a field has another type; the message names the field.
    """
    cls = type(config)
    hints = typing.get_type_hints(cls)
    for field in fields(config):
        value, where = getattr(config, field.name), f"{cls.__name__}.{field.name}"
        _fit(value, hints[field.name], where)
        if isinstance(value, int) and abs(value) >= 2**63:  # torch's sizes and seeds have 64 bits
            raise UserError(f"{where} must be below 2^63, got {_short(value)}")


def check_rules(config: Any, rules: Mapping[str, tuple[bool, str]]) -> None:
    """Check rules, given by field: whether the rule is met, and words for what is allowed.

    Raises:
        UserError: "FIELD must be ALLOWED, got VALUE", for the first rule that is not met.
    """
    for name, (is_met, allowed) in rules.items():
        if not is_met:
            raise UserError(f"{name} must be {allowed}, got {getattr(config, name)!r}")


def differences(ours: Any, usual: Any, unsaid: Sequence[str] = ()) -> list[str]:
    """Say how two dataclasses of one type differ, except in the fields `unsaid`."""
    names = (field.name for field in fields(usual) if field.name not in unsaid)
    pairs = ((name, getattr(ours, name), getattr(usual, name)) for name in names)
    return [f"{name} {found}, not {wanted}" for name, found, wanted in pairs if found != wanted]


def _encode(value: Any, where: str) -> Any:
    if isinstance(value, float) and math.isinf(value):
        return _INFINITIES[value]  # JSON has no such number
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, tuple):
        return [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(value)
    raise TypeError(f"{where} cannot be stored as JSON: {type(value).__name__} {value!r}")


def _decode(value: Any, where: str, allow: tuple[str, ...]) -> Any:
    """Turn JSON's lists into tuples and its objects into dataclasses."""
    if isinstance(value, list):
        return tuple(_decode(item, f"{where}[{i}]", allow) for i, item in enumerate(value))
    return _decode_dataclass(value, where, allow) if isinstance(value, dict) else value


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
            raise UserError(
                f"{where}: {cls.__name__} has no field {_short(name)}{nearest(name, known)}"
            )
        place = f"{where}.{name}"
        values[name] = _fit(_decode(value, place, allow), hints[name], place, from_file=True)
    missing = [name for name, field in known.items() if name not in values and _required(field)]
    if missing:
        raise UserError(f"{where}: {cls.__name__} needs {', '.join(missing)}")
    try:
        return cls(**values)
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"{where}: {cls.__name__} refuses its values: {error}") from error


def _find_class(name: str, where: str, allow: tuple[str, ...]) -> type:
    """Import the class that `name`, "module:ClassName", stands for."""
    if not _TYPE.fullmatch(name):
        raise UserError(f'{where}: a type is written "module:ClassName", got {_short(name)}')
    module_name, _, class_name = name.partition(":")
    package = module_name.partition(".")[0]
    if not any(_in_package(module_name, allowed) for allowed in allow):
        _check_ours(package, f"{where}: type {_short(name)}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        loaded = [m for m in sys.modules if _in_package(m, package)]
        hint = nearest(module_name, get_close_matches(module_name, loaded))
        raise UserError(f"{where}: cannot import {module_name!r} ({error}){hint}") from error
    cls = getattr(module, class_name, None)
    if not _is_frozen_dataclass(cls) or cls.__module__ != module_name:
        own = [n for n, value in vars(module).items() if _is_frozen_dataclass(value)]
        hint = nearest(class_name, own)
        raise UserError(f"{where}: {module_name} has no frozen dataclass {class_name!r}{hint}")
    return typing.cast(type, cls)


def _check_ours(package: str, name: str) -> None:
    """Refuse a package that is not mezzo's, not installed, or in the current folder.

    `python -m` and notebooks make Python import from the current folder first. Whoever wrote the
    file being read may have put a folder with the package's name there.
    """
    allow = (
        f"--allow-package {package} allows it (allow_packages in Python, "
        "MezzoConfig.allowed_packages with transformers)"
    )
    if not package.startswith("mezzo_"):
        raise UserError(f"{name} is not from an allowed package: {allow}")
    spec = find_spec(package)
    if spec is None:
        raise UserError(f"{name} needs {package}, which is not installed")
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    places = [folder.parent.resolve() for folder in folders]
    is_here = spec.origin is None or not folders or Path.cwd().resolve() in places
    if is_here and package not in sys.modules:  # importing a loaded package runs nothing new
        raise UserError(
            f"{name} needs {package}, and the one in the current folder is not imported: change to "
            f"another folder, or {allow}"
        )
    if not any((folder / MARKER).exists() for folder in folders):
        raise UserError(f"{name} is not from an allowed package: {allow}")


def _fit(value: Any, hint: Any, where: str, *, from_file: bool = False) -> Any:
    """Return the value, converted to fit the annotation `hint`, or raise a UserError.

    With `from_file`, "inf" is what `to_json` writes for an infinite float.
    """
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        return _fit_union(value, args, where, from_file)
    if origin is Literal:
        if not any(value == arg and type(value) is type(arg) for arg in args):
            raise UserError(f"{where} must be one of {args}, got {_short(value)}")
        return value
    if hint is tuple or origin is tuple:
        return _fit_tuple(value, args, where, from_file)
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and from_file and value in _INFINITIES.values():
        return float(value)
    if hint is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise UserError(f"{where} is too large for a float: {_short(value)}") from None
    if not _is_one(value, origin or hint):
        raise UserError(f"{where} must be {getattr(hint, '__name__', hint)}, got {_short(value)}")
    return value


def _is_one(value: Any, kind: Any) -> bool:
    if kind is int and isinstance(value, bool):  # a bool is an int in Python, but a mistake here
        return False
    if getattr(kind, "_is_protocol", False):  # any class with the protocol's methods fits
        methods = [name for name in vars(kind) if not name.startswith("_")]
        return not isinstance(value, type) and all(
            callable(getattr(value, name, None)) for name in methods
        )
    return isinstance(value, kind)


def _fit_union(value: Any, args: tuple[Any, ...], where: str, from_file: bool) -> Any:
    if value is None and type(None) in args:
        return None
    choices = [arg for arg in args if arg is not type(None)]
    errors = []
    # Try a choice of exactly the value's type first, so that 1 stays an int for `float | int`.
    for choice in sorted(choices, key=lambda arg: type(value) is not arg):
        try:
            return _fit(value, choice, where, from_file=from_file)
        except UserError as error:
            errors.append(str(error))
    also = "; None is allowed too" if type(None) in args else ""
    raise UserError("; or ".join(errors) + also)


def _fit_tuple(value: Any, args: tuple[Any, ...], where: str, from_file: bool) -> Any:
    if not isinstance(value, tuple):
        raise UserError(f"{where} must be a tuple (in JSON a list), got {_short(value)}")
    if not args:
        return value
    if args[-1] is Ellipsis:
        hints: Sequence[Any] = [args[0]] * len(value)
    elif len(args) == len(value):
        hints = args
    else:
        raise UserError(f"{where} must have {len(args)} items, got {len(value)}")
    return tuple(
        _fit(item, hint, f"{where}[{i}]", from_file=from_file)
        for i, (item, hint) in enumerate(zip(value, hints, strict=True))
    )


def _is_frozen_dataclass(cls: Any) -> bool:
    return isinstance(cls, type) and is_dataclass(cls) and cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


def _init_fields(cls: type) -> list[Field[Any]]:
    return [field for field in fields(cls) if field.init]


def _required(field: Field[Any]) -> bool:
    return field.default is MISSING and field.default_factory is MISSING


def _in_package(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
