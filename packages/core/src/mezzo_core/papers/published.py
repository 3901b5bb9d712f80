"""The tables and claims of a paper as printed, read from a `published.toml`.

Such a file has only the paper's numbers, none of ours. Its rules are:

- A row's `values` has one entry for each of its table's `columns`. (group, model) identifies a row.
- `column_better`, `column_metric` and `column_unit` have one entry for each column, and override
  the table's `better`, `metric` and `unit`.
- A row with `kind = "ratio"` is derived from other rows, and is left out of orderings.
- A claim's `ordering` names models, best first. Its `labels` has one entry for each value.
"""

import dataclasses
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
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

    def __new__(cls, text: str) -> "Printed":
        """Parse the text and keep it."""
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str

    def __str__(self) -> str:
        return self.text


Record = TypeVar("Record", "Row", "Table", "Claim")


@dataclass(frozen=True)
class Row:
    """One line of a printed table; `group` is the batch, size or regime to which it belongs."""

    model: str
    values: tuple[Value, ...]
    group: str = ""
    kind: str = ""
    unit: str = ""
    better: str = ""
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

    def column(self, name: str, group: str = "") -> dict[str, float]:
        """Return the numbers of one column by model, without ratios and cells without a number."""
        if name not in self.columns:
            raise ValueError(f"{self.id} has no column {name!r}, only {', '.join(self.columns)}")
        place = self.columns.index(name)
        return {
            row.model: float(row.values[place])
            for row in self.rows
            if row.kind != "ratio" and row.group == group and not isinstance(row.values[place], str)
        }

    def ordering(self, column: str, group: str = "") -> tuple[str, ...]:
        """Return the models by one column, best first; empty if neither direction is better."""
        direction = self.direction(column)
        if direction not in ("lower", "higher"):
            return ()
        values = self.column(column, group)
        return tuple(sorted(values, key=lambda m: values[m], reverse=direction == "higher"))

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
    notes: str = ""

    def labelled(self) -> dict[str, Value]:
        """Return the printed values by their labels."""
        return dict(zip(self.labels, self.values, strict=True))


@dataclass(frozen=True)
class Published:
    """A paper's tables and claims, in the order of the file."""

    title: str
    authors: str
    code: str
    tables: tuple[Table, ...]
    claims: tuple[Claim, ...]

    @property
    def ids(self) -> tuple[str, ...]:
        """All ids, those of tables first."""
        return (*(table.id for table in self.tables), *(claim.id for claim in self.claims))

    @property
    def by_id(self) -> dict[str, Table | Claim]:
        """All tables and claims by their ids."""
        every: list[Table | Claim] = [*self.tables, *self.claims]
        return {each.id: each for each in every}

    def entry(self, id: str) -> Table | Claim:
        """Return the table or claim of this id; a KeyError if the paper has none."""
        return self.by_id[id]

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
        code=paper.get("code", "not stated"),
        tables=tuple(_table(entry) for entry in content.get("table", [])),
        claims=tuple(_claim(entry) for entry in content.get("claim", [])),
    )
    repeated = {id for id in published.ids if published.ids.count(id) > 1}
    if repeated:
        raise UserError(f"{path}: ids used more than once: {', '.join(sorted(repeated))}")
    return published


def _table(entry: dict[str, Any]) -> Table:
    rows = tuple(_row(row, entry.get("id", "a table")) for row in entry.get("rows", []))
    table = _record(Table, {**entry, "rows": rows}, entry.get("id", "a table"))
    for row in rows:
        if len(row.values) != len(table.columns):
            raise UserError(
                f"{table.id}: {row.name} has {len(row.values)} values "
                f"for {len(table.columns)} columns"
            )
    for key in ("column_metric", "column_unit", "column_better", "column_names", "column_shots"):
        if len(getattr(table, key)) not in (0, len(table.columns)):
            raise UserError(f"{table.id}: {key} is not parallel to columns")
    return table


def _row(entry: dict[str, Any], where: str) -> Row:
    known = {field.name for field in dataclasses.fields(Row)} - {"attributes"}
    attributes = {key: value for key, value in entry.items() if key not in known}
    fields = {key: value for key, value in entry.items() if key in known}
    return _record(Row, {**fields, "attributes": attributes}, f"{where}, a row")


def _claim(entry: dict[str, Any]) -> Claim:
    claim = _record(Claim, entry, entry.get("id", "a claim"))
    if claim.labels and len(claim.labels) != len(claim.values):
        raise UserError(f"{claim.id}: {len(claim.labels)} labels for {len(claim.values)} values")
    return claim


def _record(kind: type[Record], entry: dict[str, Any], where: str) -> Record:
    known = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(entry) - set(known))
    required = [
        name
        for name, field in known.items()
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    ]
    missing = sorted(set(required) - set(entry))
    if unknown or missing:
        raise UserError(f"{where}: unknown keys {unknown or 'none'}, missing {missing or 'none'}")
    fields: dict[str, Any] = {
        key: tuple(value) if isinstance(value, list) else value for key, value in entry.items()
    }
    return kind(**fields)
