"""Named tuples in code that torch.compile traces: torch 2.8 cannot trace `_replace`."""

from typing import Any, TypeVar

Record = TypeVar("Record", bound=tuple[Any, ...])


def replaced(record: Record, **changes: Any) -> Record:
    """Return a named tuple with other values of some fields."""
    kind: Any = type(record)
    fields = {name: getattr(record, name) for name in kind._fields}
    return kind(**{**fields, **changes})
