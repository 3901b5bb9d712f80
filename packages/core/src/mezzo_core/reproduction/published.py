"""The tables and claims of a paper as printed, read from a `published.toml`.

Such a file has the paper's numbers, none of ours. Its rules are:

- A row's `values` has one entry for each of its table's `columns`. (group, model) identifies a row.
- `column_better`, `column_metric` and `column_unit` have one entry for each column, and override
  the table's `better`, `metric` and `unit`.
- A row with `kind = "ratio"` is derived from other rows, and is left out of orderings.
- `needs` says what a table or claim would need that has no evidence.
- A claim's `ordering` names models, best first. Its `labels` has one entry for each value, and so
  has `ours` of a set-up: where its `recipe` has the value (see `beside`), "" if it has none.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from mezzo_core.errors import UserError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

Value = float | int | str


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
    attributes: Mapping[str, Value] = field(default_factory=dict)

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
    notes: str = ""
    column_metric: tuple[str, ...] = ()
    column_unit: tuple[str, ...] = ()
    column_better: tuple[str, ...] = ()
    column_names: tuple[str, ...] = ()
    column_shots: tuple[Value, ...] = ()
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
    kind: str = "number"
    labels: tuple[str, ...] = ()
    unit: str = ""
    better: str = ""
    qualifier: str = ""
    ordering: tuple[str, ...] = ()
    tables: tuple[str, ...] = ()
    recipe: str = ""
    ours: tuple[str, ...] = ()
    notes: str = ""
    needs: str = ""

    def labelled(self) -> dict[str, Value]:
        """Return the printed values by their labels."""
        return dict(zip(self.labels, self.values, strict=True))


Record = TypeVar("Record", Row, Table, Claim)


@dataclass(frozen=True)
class Published:
    """A paper's tables and claims, in the order of the file."""

    title: str
    authors: str
    code: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]
    arxiv: str = "not stated"

    @property
    def by_id(self) -> dict[str, Table | Claim]:
        """All tables, then all claims, by their ids."""
        return {table.id: table for table in self.tables} | {c.id: c for c in self.claims}

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids, those of tables first."""
        return tuple(self.by_id)

    def table(self, id: str) -> Table:
        """Return the table of this id; a KeyError if the paper has none."""
        return {table.id: table for table in self.tables}[id]

    def claim(self, id: str) -> Claim:
        """Return the claim of this id; a KeyError if the paper has none."""
        return {claim.id: claim for claim in self.claims}[id]


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
    paper = content.get("paper", {})
    authors = paper.get("authors", "not stated")
    published = Published(
        title=paper.get("title", path.stem),
        authors=authors if isinstance(authors, str) else ", ".join(authors),
        arxiv=paper.get("arxiv", "not stated"),
        code=paper.get("code", "not stated"),
        tables=tuple(map(_table, content.get("table", []))),
        claims=tuple(map(_claim, content.get("claim", []))),
    )
    ids = Counter([t.id for t in published.tables] + [c.id for c in published.claims])
    if repeated := sorted(id for id, count in ids.items() if count > 1):
        raise UserError(f"{path}: ids used more than once: {', '.join(repeated)}")
    return published


def _table(entry: dict[str, Any]) -> Table:
    where = entry.get("id", "a table")
    rows = tuple(_row(row, f"{where}, a row") for row in entry.get("rows", []))
    table = _record(Table, {**entry, "rows": rows}, where)
    width = len(table.columns)
    for row in rows:
        if len(row.values) != width:
            raise UserError(f"{where}: {row.name} has {len(row.values)} values for {width} columns")
    for key, values in vars(table).items():
        if key.startswith("column_") and len(values) not in (0, width):
            raise UserError(f"{where}: {key} is not parallel to columns")
    return table


def _row(entry: dict[str, Any], where: str) -> Row:
    fields = ("model", "values", "group", "kind")
    known: dict[str, Any] = {key: value for key, value in entry.items() if key in fields}
    attributes = {key: value for key, value in entry.items() if key not in fields}
    return _record(Row, {**known, "attributes": attributes}, where)


def _claim(entry: dict[str, Any]) -> Claim:
    claim = _record(Claim, entry, entry.get("id", "a claim"))
    if claim.labels and len(claim.labels) != len(claim.values):
        raise UserError(f"{claim.id}: {len(claim.labels)} labels for {len(claim.values)} values")
    if len(claim.ours) not in (0, len(claim.values)):
        raise UserError(f"{claim.id}: {len(claim.ours)} of `ours` for {len(claim.values)} values")
    return claim


def _record(kind: type[Record], entry: dict[str, Any], where: str) -> Record:
    """Build a row, table or claim, whose fields the keys must be; lists become tuples."""
    known = {field.name: field for field in dataclasses.fields(kind)}
    required = [n for n, f in known.items() if f.default is f.default_factory is MISSING]
    unknown = sorted(set(entry) - set(known))
    missing = sorted(set(required) - set(entry))
    if unknown or missing:
        raise UserError(f"{where}: unknown keys {unknown or 'none'}, missing {missing or 'none'}")
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in entry.items()}
    return kind(**fields)
