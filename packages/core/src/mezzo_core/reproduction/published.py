"""The tables and claims of a paper as printed, read from a `published.toml`.

Such a file has the paper's numbers, none of ours. Its rules are:

- A row's `values` has one entry for each of its table's `columns`. (group, model) identifies a row.
- `column_better`, `column_metric` and `column_unit` have one entry for each column, and override
  the table's `better`, `metric` and `unit`.
- A row with `kind = "ratio"` is derived from other rows, and is left out of orderings.
- `FOR_READERS`, and unknown keys of a row, are notes for people: the code ignores them.
- `needs` says what a table or claim without evidence would need.
- A claim's `ordering` names models, best first. Its `labels` has one entry for each value, and so
  has `ours` of a set-up: where its `recipe` has the value (see `beside`), "" if it has none.
"""

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

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
        ValueError: if it is not TOML, or breaks a rule of this module; the message names the table
            or claim.
        TypeError: if a table or claim lacks a key, or has an unknown one, which is named.
    """
    content = tomllib.loads(path.read_text(encoding="utf-8"), parse_float=Printed)
    tables = tuple(map(_table, content.get("table", [])))
    claims = tuple(Claim(**_read(Claim, each)) for each in content.get("claim", []))
    for table in tables:
        widths = {len(row.values) for row in table.rows} | {len(table.column_better)} - {0}
        if widths != {len(table.columns)}:
            raise ValueError(f"{table.id}: rows or column_better are not parallel to columns")
    for claim in claims:
        if {len(claim.labels), len(claim.ours)} - {0, len(claim.values)}:
            raise ValueError(f"{claim.id}: labels or `ours` are not parallel to values")
    if len({t.id for t in tables} | {c.id for c in claims}) < len(tables) + len(claims):
        raise ValueError(f"{path}: an id is used more than once")
    paper = content["paper"]
    told = {key: paper[key] for key in ("code", "arxiv") if key in paper}
    return Published(paper["title"], tables, claims, ", ".join(paper["authors"]), **told)


def _table(entry: dict[str, Any]) -> Table:
    names = {field.name for field in fields(Row)}  # what else a row has is for readers
    rows = (Row(**_read(Row, {k: row[k] for k in names & row.keys()})) for row in entry["rows"])
    return Table(**{**_read(Table, entry), "rows": tuple(rows)})


def _read(kind: type[Row | Table | Claim], entry: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an entry, without what is for readers; lists become tuples."""
    left_out = FOR_READERS - {field.name for field in fields(kind)}
    known = {key: value for key, value in entry.items() if key not in left_out}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in known.items()}
