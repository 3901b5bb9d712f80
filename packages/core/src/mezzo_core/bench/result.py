"""A result file: what was measured, on which machine, at which commit, and the numbers.

It is one JSON object: the fields of `Header`, those of `origin`, and a list of entries, such as

    {"group": "B=64", "model": "RAT(L=16)", "column": "4096", "seed": 0, "value": 1.25, "B": 64}

A speed has an entry for each pass, numbered by `seed`; a training has one for each seed. What
follows the value are details of the same measurement.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock  # torch brings it

from mezzo_core.config_json import check_fields
from mezzo_core.errors import UserError
from mezzo_core.files import acquire, is_number, read_json, write_whole

Say = Callable[[str], None]


@dataclass(frozen=True)
class Header:
    """What a file measures; columns, models and groups are names in the paper's order."""

    kind: Literal["speed", "training", "recall"]
    title: str  # the table or figure, in words
    setting: str  # what was measured, in words
    how: Literal["the paper's setting", "other hardware", "scaled down"]
    columns: tuple[str, ...]
    models: tuple[str, ...]
    unit: str  # of the values
    better: Literal["lower", "higher"]
    groups: tuple[str, ...] = ()  # none if there is only one

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class EntryFields:
    """The fields of an entry that tables, figures and claims read; it may have others."""

    model: str
    column: str
    value: float | Literal["OOM", "diverged"]
    group: str = ""
    seed: int = 0
    lr: float = 0.0
    state_bytes: int = 0
    parameters: int = 0
    tokens_per_second: float = 0.0
    peak_gb: float = 0.0
    host_ms: float = 0.0
    commit: str = ""
    steps: dict[str, list[list[float]]] = field(default_factory=dict)
    """Curves by name, such as "train": points of a step and a loss."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not all(map(_is_curve, self.steps.values())):
            raise UserError("EntryFields.steps must hold lists of points [step, loss]")
        for name, value in vars(self).items():
            if isinstance(value, float) and not is_number(value):
                raise UserError(f"EntryFields.{name} must be finite, got {value}")


def read_content(path: Path) -> tuple[Header, dict[str, Any]]:
    """Read a result file; return its header and all of its content.

    Raises:
        UserError: if it cannot be read or is no result. The message names the file and the reason.
    """
    content = read_json(path)
    try:
        given: dict[str, Any] = {}
        for name in (each.name for each in fields(Header) if each.name in content):
            value = content[name]
            given[name] = tuple(value) if isinstance(value, list) else value
        header = Header(**given)
        check_origin(content)
        keys = set()
        for entry in content["entries"]:
            key = _checked_key(entry, header)
            if key in keys:
                raise ValueError(f"two entries of {key}")
            keys.add(key)
    except KeyError as error:
        raise UserError(f"{path}: no result file: {error} is missing") from error
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: no result file: {error}") from error
    return header, content


def check_origin(content: Mapping[str, Any]) -> None:
    """Check what a result or a row of a bench says of the machine and the software.

    Raises:
        KeyError: if a necessary text is missing.
        TypeError: if one is no text.
    """
    texts = {name: content[name] for name in ("cpu", "torch", "date")}
    others = {name: content[name] for name in ("gpu", "commit")}
    others |= {name: content.get(name) for name in ("triton", "driver", "cuda", "ptxas")}
    for name, text in (texts | others).items():
        if not isinstance(text, str) and (text is not None or name in texts):
            raise TypeError(f"{name} must be a text, got {text!r:.60}")


class Result:
    """A result file that is written whole at each addition, so that a kill loses nothing.

    What is compared in one file was measured on one machine at one commit. So a file is continued
    only if all but its entries and its date are the same.
    """

    def __init__(
        self, path: Path, header: Header, origin: Mapping[str, Any], say: Say = lambda line: None
    ) -> None:
        """Read the file, if it exists, and create its folder, before anything is measured.

        Args:
            path: the file.
            header: what is measured.
            origin: from `mezzo_core.bench.origin`.
            say: called with a line about each addition.

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
        self.entries: list[dict[str, Any]] = []
        self._keys: set[tuple[str, str, str, int]] = set()
        self._take_in()

    def _take_in(self) -> None:
        """Read the file, if it exists, and take in its entries.

        Raises:
            UserError: if it is no result, or of another header, machine or commit.
        """
        if not self.path.exists():
            return
        _, content = read_content(self.path)
        for name, ours in self._head.items():
            if name != "date" and content.get(name) != ours:
                was = f"{content.get(name)!r:.300}, not {ours!r:.300}"
                raise UserError(
                    f"{self.path} has another {name} ({was}): remove it, or write elsewhere"
                )
        self.entries += [entry for entry in content["entries"] if _key(entry) not in self._keys]
        self._keys |= set(map(_key, content["entries"]))

    def has(self, model: str, column: str, group: str = "", seed: int = 0) -> bool:
        """Tell whether the file has this entry."""
        return (model, column, group, seed) in self._keys

    def best_column(self, model: str, group: str = "", seed: int = 0) -> str | None:
        """Return the column where a model's number is best; None if it has no numbers."""
        found = {
            entry["column"]: entry["value"]
            for entry in self.entries
            if (entry["model"], *_key(entry)[2:]) == (model, group, seed)
        }
        return best_of(found, self.header.better)

    def add(
        self,
        value: float | str,
        *,
        model: str,
        column: str,
        group: str = "",
        seed: int = 0,
        **details: Any,
    ) -> None:
        """Add an entry and write the file.

        Numbers are rounded to five significant digits; details that are None are left out.

        Raises:
            ValueError: if the header lacks the model, column or group, the file has this entry, or
                a value is no finite number and none of the known words.
            UserError: if the file cannot be written, or has become another's.
        """
        names = {"group": group, "model": model, "column": column, "seed": seed}
        self._add([{**names, "value": value, **details}])

    def add_passes(
        self,
        passes: list[Any] | str,
        field: str,
        *,
        model: str,
        column: str,
        group: str = "",
        **details: Any,
    ) -> None:
        """Add all passes of a speed, and write the file; the errors are those of `add`.

        `passes`, from `attempt`, has a dataclass for each pass, such as a `Timing`, or is OOM. Of a
        pass, `field` is the value, and the other fields become details.
        """
        names = {"group": group, "model": model, "column": column}
        found = [{field: passes}] if isinstance(passes, str) else map(asdict, passes)
        self._add(
            {**names, "seed": seed, "value": each.pop(field), **details, **each}
            for seed, each in enumerate(found)
        )

    def _add(self, entries: Iterable[Mapping[str, Any]]) -> None:
        told = [{k: part for k, part in each.items() if part not in (None, "")} for each in entries]
        new = json.loads(json.dumps(told, allow_nan=False), parse_float=_rounded)
        try:
            # Another script may add to the file, such as one that measures other models on another
            # GPU: what it has measured stays, and under the lock nothing comes between.
            with acquire(FileLock(self.path.with_name(f".{self.path.stem}.lock"))):
                self._take_in()
                names = self._check_new(new)
                write_whole(self.path, self._text([*self.entries, *new]))
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"{self.path}: cannot be written ({reason})") from error
        self.entries += new
        self._keys.update(map(_key, new))
        values = " ".join(str(entry["value"]) for entry in new)
        place = ", ".join(str(name) for name in names if name != "")
        self._say(f"{self.path.stem}: {place}: {values} {self.header.unit}")

    def _check_new(self, new: list[dict[str, Any]]) -> tuple[str, str, str, int]:
        """Return the place of the first new entry, which the header must have, and we must not."""
        names, *_ = [_checked_key(entry, self.header) for entry in new]
        if names in self._keys:
            raise ValueError(f"{self.path.name} has {names} already")
        return names

    def _text(self, entries: list[dict[str, Any]]) -> str:
        lines = [f" {json.dumps(name)}: {json.dumps(part)}," for name, part in self._head.items()]
        rows = (f"  {json.dumps(entry)}" for entry in entries)
        return "\n".join(["{", *lines, ' "entries": [', ",\n".join(rows), " ]", "}", ""])


def best_of(values: Mapping[str, float | str], better: str) -> str | None:
    """Return the name of the best number, the first of equal ones; None if there are only words."""
    numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
    choose = max if better == "higher" else min
    return choose(numbers, key=numbers.__getitem__, default=None)


def _key(entry: Mapping[str, Any]) -> tuple[str, str, str, int]:
    return entry["model"], entry["column"], entry.get("group", ""), entry.get("seed", 0)


def _is_curve(points: Any) -> bool:
    return isinstance(points, list) and all(
        isinstance(point, list) and len(point) == 2 and all(map(is_number, point))
        for point in points
    )


def _checked_key(entry: Any, header: Header) -> tuple[str, str, str, int]:
    """Check an entry and its place in the header; return its key."""
    if not isinstance(entry, dict):
        raise TypeError(f"an entry must be an object, got {entry!r:.60}")
    EntryFields(**{f.name: entry[f.name] for f in fields(EntryFields) if f.name in entry})
    key = _key(entry)
    known = (header.models, header.columns, header.groups or ("",))
    for name, allowed in zip(key, known, strict=False):
        if name not in allowed:
            raise ValueError(f"{name!r} is none of the header's {allowed}")
    return key


def _rounded(number: str) -> float:
    """Read a number to five significant digits: further ones would be noise."""
    return float(f"{float(number):.5g}")
