"""The result file of a speed table, which is measured and written cell by cell.

The file has the format of `mezzo_core.papers.results`, and beside its `rows` a list `cells`. Each
cell has its values (one for each pass, or "OOM"), the peak memory if it was measured, the commit
and the date. The file is written after each cell, so a killed run keeps its measurements.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from mezzo_core.errors import UserError
from mezzo_core.papers.runs import write_result

OOM = "OOM"
MISSING = "-"
Key = tuple[str, str, str]
"""Group, model and column of a cell."""
Say = Callable[[str], None]
"""Called with a line about the cell that was just measured."""
Timed = tuple[list[float] | str, dict[str, Any]]
"""The values of a cell (one for each pass, or OOM), and further entries to store with it."""


@dataclass(frozen=True)
class SpeedTable:
    """The rows, columns and units of a speed table, without its values.

    Attributes:
        name: part of its file's name, speed_NAME.json.
        ids: ids of the paper's tables and claims that it answers.
        columns, models, groups: names in the order of the paper.
        ratios: pairs of models. Each makes a further row: the first one's values divided by the
            second one's.
        unit, better: unit of the values, and whether "lower" or "higher" values are better.
        setting: the measured setting in words.
    """

    name: str
    ids: tuple[str, ...]
    columns: tuple[str, ...]
    models: tuple[str, ...]
    ratios: tuple[tuple[str, str], ...]
    unit: str
    better: str
    setting: str
    groups: tuple[str, ...] = ("",)


class Result:
    """The result file of one speed table in a folder; cells of an earlier run are kept."""

    def __init__(self, table: SpeedTable, folder: Path, origin: Mapping[str, Any]) -> None:
        """Read the file, if it exists.

        Args:
            table: the table to measure.
            folder: folder of the file.
            origin: the result of `mezzo_core.bench.environment`, with the measured commit.

        Raises:
            UserError: if the file was measured on another machine, or is not the result file of a
                speed table.
        """
        self.table = table
        self.path = folder / f"speed_{table.name}.json"
        self._origin = dict(origin)
        self.cells: dict[Key, dict[str, Any]] = {}
        if self.path.exists():
            self.cells = self._read()

    def has(self, key: Key) -> bool:
        """Tell whether the cell was already measured at this commit; False if that is unknown."""
        cell = self.cells.get(key)
        commit = self._origin["commit"]
        return cell is not None and commit is not None and cell["commit"] == commit

    def add(self, key: Key, values: Sequence[float] | str, **details: Any) -> None:
        """Add a cell, replacing an older one, and write the file."""
        group, model, column = key
        self.cells[key] = {
            **{"group": group, "model": model, "column": column},
            "values": values if isinstance(values, str) else [significant(v) for v in values],
            **{name: value for name, value in details.items() if value is not None},
            **{name: self._origin[name] for name in ("commit", "date")},
        }
        write_result(self.path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the content of the file."""
        return {
            "id": list(self.table.ids),
            "same_setting": False,
            "setting": self.table.setting,
            "columns": list(self.table.columns),
            "unit": self.table.unit,
            "better": self.table.better,
            "rows": [row for group in self.table.groups for row in self._rows(group)],
            **self._origin,
            "cells": list(self.cells.values()),
        }

    def _rows(self, group: str) -> list[dict[str, Any]]:
        """Return one row for each model and pass, then the ratios."""
        table, rows = self.table, []
        for model in table.models:
            found = [self.cells.get((group, model, column)) for column in table.columns]
            rows += _passes([MISSING if cell is None else cell["values"] for cell in found], model)
        for first, second in table.ratios:
            pairs = [
                [self.cells.get((group, model, column)) for model in (first, second)]
                for column in table.columns
            ]
            rows += _passes([_ratio(*pair) for pair in pairs], f"{first}/{second}")
        return [{"group": group, **row} if group else row for row in rows]

    def _read(self) -> dict[Key, dict[str, Any]]:
        try:
            content = json.loads(self.path.read_text(encoding="utf-8"))
            machine = content["gpu"] or content["cpu"]
            cells = {(c["group"], c["model"], c["column"]): c for c in content["cells"]}
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise UserError(f"{self.path}: no result of a speed table: {error}") from error
        ours = self._origin["gpu"] or self._origin["cpu"]
        if machine != ours:
            raise UserError(f"{self.path} was measured on {machine}, this is {ours}")
        return cells


def add_cell(result: Result, key: Key, work: Callable[[], Timed], say: Say) -> None:
    """Measure a cell and add it; its value is OOM if the work does not fit into the GPU."""
    try:
        values, details = work()
    except torch.OutOfMemoryError:
        values, details = OOM, {}
    result.add(key, values, **details)
    say(f"{result.table.name}  {' '.join(filter(None, key))}  {describe(values, details)}")


def describe(values: list[float] | str, details: Mapping[str, Any]) -> str:
    """Describe a cell in one line."""
    text = values if isinstance(values, str) else " ".join(f"{value:.4g}" for value in values)
    parts = (f"{k} {v:.4g}" for k, v in details.items() if isinstance(v, int | float))
    return ", ".join([text, *parts])


def significant(value: float) -> float:
    """Round to five significant digits; further digits would be noise."""
    return float(f"{value:.5g}")


def _passes(columns: list[Any], model: str) -> list[dict[str, Any]]:
    """Turn a model's cells into one row for each pass; no rows if no cell was measured."""
    count = max((len(cell) for cell in columns if not isinstance(cell, str)), default=1)
    if all(cell == MISSING for cell in columns):
        return []
    return [
        {"model": model, "values": [c if isinstance(c, str) else c[i] for c in columns]}
        for i in range(count)
    ]


def _ratio(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> list[float] | str:
    if first is None or second is None:
        return MISSING
    if OOM in (first["values"], second["values"]):
        return MISSING
    pairs = zip(first["values"], second["values"], strict=True)
    return [significant(a / b) for a, b in pairs]
