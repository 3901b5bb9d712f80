"""The tables and claims of a paper as printed, read from a `published.toml`.

Such a file has the paper's numbers, none of ours. Its rules are:

- A row's `values` has one entry for each of its table's `columns`. (group, model) identifies a row.
- `column_better`, `column_metric` and `column_unit` have one entry for each column, and override
  the table's `better`, `metric` and `unit`.
- A row with `kind = "ratio"` is derived from other rows, and is left out of orderings.
- `FOR_READERS`, and unknown keys of a row, are notes for people: the code ignores them.
- `needs` says what a table or claim would need that has no evidence.
- A claim's `ordering` names models, best first. Its `labels` has one entry for each value, and so
  has `ours` of a set-up: where its `recipe` has the value (see `beside`), "" if it has none.
"""

import dataclasses
import sys
from collections import Counter
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Any, TypeVar

from mezzo_core.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

Value = float | int | str
FOR_READERS = {"notes", "qualifier", "kind", "tables", "better"}
FOR_READERS |= {f"column_{what}" for what in ("metric", "unit", "names", "shots")}


class Printed(float):
    """A number that is shown as it is written in the file: 77.00 stays 77.00."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class Row:
    """One line of a printed table; `group` is the batch, size or regime to which it belongs."""

    model: str
    values: tuple[Value, ...]
    group: str = ""
    kind: str = ""

    @property
    def name(self) -> str:
        """The model, with its group if it has one."""
        return f"{self.model} ({self.group})" if self.group else self.model


@dataclass(frozen=True)
class Table:
    """One printed table, with the direction in which each column is better."""

    id: str
    title: str
    metric: str
    unit: str
    better: str
    setting: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    hardware: str = ""
    column_better: tuple[str, ...] = ()
    needs: str = ""

    def column(self, name: str, group: str = "") -> dict[str, float]:
        """Return the numbers of one column by model, without ratios and cells without a number."""
        place = self.columns.index(name)
        rows = [row for row in self.rows if row.kind != "ratio" and row.group == group]
        cells = {row.model: row.values[place] for row in rows}
        return {model: float(v) for model, v in cells.items() if not isinstance(v, str)}

    def direction(self, column: str) -> str:
        """Return which values are better in this column: "lower", "higher" or "none"."""
        if self.column_better:
            return self.column_better[self.columns.index(column)]
        return self.better


@dataclass(frozen=True)
class Claim:
    """One statement of the prose: a number, an ordering, a setup, or a citation."""

    id: str
    text: str
    quantity: str
    values: tuple[Value, ...]
    where: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    ordering: tuple[str, ...] = ()
    recipe: str = ""
    ours: tuple[str, ...] = ()
    needs: str = ""

    def labelled(self) -> dict[str, Value]:
        """Return the printed values by their labels."""
        return dict(zip(self.labels, self.values, strict=True))


Record = TypeVar("Record", Row, Table, Claim)


@dataclass(frozen=True)
class Published:
    """A paper's tables and claims, in the order of the file."""

    title: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    authors: str = "not stated"
    code: str = "not stated"
    arxiv: str = "not stated"

    @property
    def by_id(self) -> dict[str, Table | Claim]:
        """All tables, then all claims, by their ids."""
        return {table.id: table for table in self.tables} | {c.id: c for c in self.claims}


def load_published(path: Path) -> Published:
    """Read a `published.toml`.

    Raises:
        UserError: if the file is missing or breaks a rule of this module; the message names the
            table or claim.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Printed)
    except OSError as error:
        raise UserError(f"{path}: cannot be read ({error.strerror})") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path}: not TOML: {error}") from error
    paper = {"title": path.stem, **content.get("paper", {})}
    if isinstance(paper.get("authors"), list):
        paper["authors"] = ", ".join(paper["authors"])
    published = Published(
        tables=tuple(map(_table, content.get("table", []))),
        claims=tuple(map(_claim, content.get("claim", []))),
        **{key: paper[key] for key in ("title", "authors", "code", "arxiv") if key in paper},
    )
    ids = Counter([each.id for each in published.tables] + [c.id for c in published.claims])
    if repeated := sorted(id for id, count in ids.items() if count > 1):
        raise UserError(f"{path}: ids used more than once: {', '.join(repeated)}")
    return published


def _table(entry: dict[str, Any]) -> Table:
    where = entry.get("id", "a table")
    table = _record(
        Table, {**entry, "rows": [_row(row, where) for row in entry.get("rows", [])]}, where
    )
    width = len(table.columns)
    for row in table.rows:
        if len(row.values) != width:
            raise UserError(f"{where}: {row.name} has {len(row.values)} values for {width} columns")
    if len(table.column_better) not in (0, width):
        raise UserError(f"{where}: column_better is not parallel to columns")
    return table


def _row(entry: dict[str, Any], where: str) -> Row:
    known = {f.name: entry[f.name] for f in dataclasses.fields(Row) if f.name in entry}
    return _record(Row, known, f"{where}, a row")


def _claim(entry: dict[str, Any]) -> Claim:
    claim = _record(Claim, entry, entry.get("id", "a claim"))
    for name, found in (("labels", claim.labels), ("of `ours`", claim.ours)):
        if len(found) not in (0, len(claim.values)):
            raise UserError(f"{claim.id}: {len(found)} {name} for {len(claim.values)} values")
    return claim


def _record(kind: type[Record], entry: dict[str, Any], where: str) -> Record:
    """Build a row, table or claim, whose fields the keys must be; lists become tuples."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    missing = sorted(n for n, f in known.items() if f.default is MISSING and n not in entry)
    unknown = sorted(entry.keys() - known.keys() - FOR_READERS)
    if unknown or missing:
        raise UserError(f"{where}: unknown keys {unknown or 'none'}, missing {missing or 'none'}")
    found: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in entry.items()
        if name in known
    }
    return kind(**found)
