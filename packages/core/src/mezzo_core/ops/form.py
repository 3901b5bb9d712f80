"""Passes a named tuple of options to a registered op, and declares it in the op's schema.

A registered op takes only tensors, numbers, strings and dtypes. So the fields of its options, a
named tuple `Form`, are its last arguments: `op(*tensors, *form)`. The schema declares them by
`schema_of(Form)`, and the op builds the named tuple again.
"""

from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

_DECLARED = {
    Tensor: "Tensor",
    int: "SymInt",
    float: "float",
    bool: "bool",
    str: "str",
    torch.dtype: "ScalarType",
}


def schema_of(*records: type) -> str:
    """Return the part of a registered op's schema that declares the fields of named tuples.

    Raises:
        KeyError: if a field has a type that no op takes.
    """
    return ", ".join(f"{kind} {name}" for each in records for name, kind in types_of(each).items())


def types_of(record: type) -> dict[str, str]:
    """Return the type in a schema of each field of a named tuple; raises as `schema_of`."""
    return {name: _declared(kind) for name, kind in get_type_hints(record).items()}


def _declared(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return "str"
    if get_origin(kind) is tuple:
        return _declared(get_args(kind)[0]) + "[]"
    if NoneType in get_args(kind):
        (kind,) = (part for part in get_args(kind) if part is not NoneType)
        return _declared(kind) + "?"
    return _DECLARED[kind]
