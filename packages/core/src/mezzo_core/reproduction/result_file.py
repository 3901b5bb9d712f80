"""A result file: what was measured, on which machine, at which commit, and the numbers.

It is one JSON object: the fields of `Header`, those of `origin`, and a list of entries, such as

    {"group": "B=64", "model": "RAT(L=16)", "column": "4096", "seed": 0, "value": 1.25, "B": 64}

A speed has an entry for each pass, numbered by `seed`; a training has one for each seed. What
follows the value are details of the same measurement.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, NamedTuple

from filelock import FileLock  # torch brings it

from mezzo_core.config_json import check_fields
from mezzo_core.errors import UserError
from mezzo_core.files import acquire, is_number, read_json, write_whole

Say = Callable[[str], None]
DIVERGED = "diverged"
"""Stands for the result of a training whose loss exploded."""
FAILED = "failed"
"""Stands for the number of a measurement that failed; the entry's `error` says why."""


class Cell(NamedTuple):
    """A place in a result: a model's row, a column, a seed (of a speed: a pass)."""

    model: str
    column: str
    group: str = ""
    seed: int = 0

    def entry(self, value: float | int | str, **details: Any) -> "Entry":
        """Return the entry of this cell."""
        return Entry(self.model, self.column, value, self.group, self.seed, details)


@dataclass(frozen=True)
class Entry:
    """One number: of a model, in a column, for one seed (of a speed: in one pass).

    A value may be a word, such as "OOM". `details` are further results of the same run.
    """

    model: str
    column: str
    value: float | int | str
    group: str = ""
    seed: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cell(self) -> Cell:
        """Where it stands."""
        return Cell(self.model, self.column, self.group, self.seed)


@dataclass(frozen=True)
class Header:
    """What a file measures; columns, models and groups are names in the paper's order."""

    kind: Literal["speed", "training", "recall", "timings"]
    title: str  # the table or figure, in words
    setting: str  # what was measured, in words
    columns: tuple[str, ...]
    models: tuple[str, ...]
    unit: str  # of the values
    how: Literal["the paper's setting", "other hardware", "scaled down"] = "scaled down"
    better: Literal["lower", "higher"] = "lower"
    groups: tuple[str, ...] = ()  # none if there is only one

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EntryFields:
    """What tables, figures and claims read of an entry, which may have more details."""

    model: str
    column: str
    value: float | Literal["OOM", "diverged", "failed"]
    group: str = ""
    seed: int = 0
    lr: float = 0.0
    state_bytes: int = 0
    parameters: int = 0
    tokens_per_second: float = 0.0
    peak_gb: float = 0.0
    host_ms: float = 0.0
    ms_p20: float = 0.0
    ms_p80: float = 0.0
    commit: str = ""
    error: str = ""
    steps: dict[str, list[list[float]]] = field(default_factory=dict)
    """Curves by name, such as "train": points of a step and a loss."""

    def __post_init__(self) -> None:
        check_fields(self)
        points = (point for curve in self.steps.values() for point in curve)
        if not all(len(point) == 2 and all(map(is_number, point)) for point in points):
            raise UserError("steps must hold lists of points [step, loss]")
        for name, value in vars(self).items():
            if isinstance(value, float) and not is_number(value):
                raise UserError(f"{name} must be finite, got {value}")


def read_file(path: Path) -> tuple[Header, dict[str, Any], list[Entry]]:
    """Read a result file; return its header, all that it says, and its entries.

    Raises:
        UserError: if it cannot be read or is no result. The message names the file and the reason.
    """
    content = read_json(path)
    try:
        found = {f.name: content[f.name] for f in fields(Header)[:-1]}
        found["groups"] = content.get("groups", [])
        told: Any = {n: tuple(v) if isinstance(v, list) else v for n, v in found.items()}
        header = Header(**told)
        _check_origin(content)
        entries: dict[Cell, Entry] = {}
        for each in content["entries"]:
            entry = _checked(each, header)
            if entry.cell in entries:
                raise ValueError(f"two entries of {tuple(entry.cell)}")
            entries[entry.cell] = entry
    except KeyError as error:
        raise UserError(f"{path}: no result file: {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: no result file: {error}") from error
    return header, content, [*entries.values()]


def _check_origin(content: Mapping[str, Any]) -> None:
    """Check what a result says of the machine and the software."""
    texts = {name: content[name] for name in ("cpu", "torch", "date")}
    others = {name: content[name] for name in ("gpu", "commit")}
    others |= {name: content.get(name) for name in ("triton", "driver", "cuda", "ptxas")}
    for name, text in (texts | others).items():
        if not isinstance(text, str) and (text is not None or name in texts):
            raise TypeError(f"{name} must be a text, got {text!r:.60}")


def _where_they_differ(was: Any, ours: Any) -> str:
    """Show two parts of headers, long ones from shortly before the place where they differ."""
    texts = (repr(was), repr(ours))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*texts, strict=False))
    start = max(0, len([*same]) - 40)
    return ", not ".join(("..." if start else "") + text[start : start + 300] for text in texts)


class Result:
    """A result file that is written whole at each addition, so that a kill loses nothing.

    All numbers of a file come from one machine at one commit, so that they can be compared. A file
    is continued only if all but its entries and its date are the same.
    """

    def __init__(
        self, path: Path, header: Header, origin: Mapping[str, Any], say: Say = lambda line: None
    ) -> None:
        """Read the file, if it exists, and create its folder, before anything is measured.

        `say` is called with a line about each addition.

        Raises:
            UserError: if the file is no result, is of another header, machine or commit, or its
                folder cannot be created.
        """
        self.path, self.header, self._say = path, header, say
        self._head = json.loads(json.dumps({**asdict(header), **origin}))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{path.parent}: cannot be made ({error.strerror})") from error
        self._found: dict[Cell, Entry] = {}
        self._take_in()

    @property
    def entries(self) -> list[Entry]:
        """All entries, in the order in which they were added."""
        return [*self._found.values()]

    def _take_in(self) -> None:
        """Read the file, if it exists, and take in its entries; errors as in `__init__`."""
        if not self.path.exists():
            return
        _, content, entries = read_file(self.path)
        for name, ours in self._head.items():
            if name != "date" and content.get(name) != ours:
                was = _where_they_differ(content.get(name), ours)
                raise UserError(
                    f"{self.path} has another {name} ({was}): remove it, or write elsewhere"
                )
        self._found |= {entry.cell: entry for entry in entries}

    def has(self, cell: Cell) -> bool:
        """Tell whether the file has an entry of this cell; what failed may be tried again."""
        return cell in self._found and self._found[cell].value != FAILED

    def best_column(self, model: str, group: str = "", seed: int = 0) -> str | None:
        """Return the column where a model's number is best; None if it has no numbers."""
        cells = (Cell(model, column, group, seed) for column in self.header.columns)
        values = {cell.column: self._found[cell].value for cell in cells if cell in self._found}
        return best_of(values, self.header.better)

    def add(self, *entries: Entry) -> None:
        """Add entries, and write the file.

        Numbers are rounded to five significant digits; details that are None are left out.

        Raises:
            ValueError: if the header lacks the model, column or group, the file has such an entry,
                or a value is no finite number and none of the known words.
            UserError: if the file cannot be written, or has become another's.
        """
        told = json.dumps([*map(_to_json, entries)], allow_nan=False)
        try:
            # Another script may have added to the file, such as one on another GPU. Its entries are
            # read first, and under the lock none can be added between reading and writing.
            with acquire(FileLock(self.path.with_name(f".{self.path.stem}.lock"))):
                self._take_in()
                new = [_checked(e, self.header) for e in json.loads(told, parse_float=_rounded)]
                for entry in new:
                    if self.has(entry.cell):
                        raise ValueError(f"{self.path.name} has {tuple(entry.cell)} already")
                whole = self._found | {entry.cell: entry for entry in new}
                write_whole(self.path, self._text([*whole.values()]))
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self.path}: cannot be written ({reason})") from error
        self._found = whole
        values = " ".join(str(entry.value) for entry in new)
        told = new[0].details.get("error", f"{values} {self.header.unit}")
        place = ", ".join(str(name) for name in new[0].cell if name != "")
        self._say(f"{self.path.stem}: {place}: {told}")

    def _text(self, entries: list[Entry]) -> str:
        lines = [f" {json.dumps(name)}: {json.dumps(part)}," for name, part in self._head.items()]
        rows = (f"  {json.dumps(_to_json(entry))}" for entry in entries)
        return "\n".join(["{", *lines, ' "entries": [', ",\n".join(rows), " ]", "}", ""])


def best_of(values: Mapping[str, float | int | str], better: str) -> str | None:
    """Return the name of the best number, the first of equal ones; None if there are only words."""
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    choose = max if better == "higher" else min
    return choose(numbers, key=numbers.__getitem__, default=None)


def _to_json(entry: Entry) -> dict[str, Any]:
    cell = {"group": entry.group, "model": entry.model, "column": entry.column, "seed": entry.seed}
    told = {**cell, "value": entry.value, **entry.details}
    return {name: part for name, part in told.items() if part not in (None, "")}


def _checked(content: Any, header: Header) -> Entry:
    """Check an entry and its place in the header."""
    if not isinstance(content, dict):
        raise TypeError(f"an entry must be an object, got {content!r:.60}")
    EntryFields(**{f.name: content[f.name] for f in fields(EntryFields) if f.name in content})
    own = {f.name for f in fields(Entry)} - {"details"}
    details = {name: part for name, part in content.items() if name not in own}
    entry = Entry(**{name: content[name] for name in own & content.keys()}, details=details)
    every = (header.models, header.columns, header.groups or ("",))
    for name, allowed in zip(entry.cell, every, strict=False):
        if name not in allowed:
            raise ValueError(f"{name!r} is none of the header's {allowed}")
    return entry


def _rounded(number: str) -> float:
    """Read a number to five significant digits: further ones would be noise."""
    return float(f"{float(number):.5g}")


def say(line: str) -> None:
    """Write a line to the standard output at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
