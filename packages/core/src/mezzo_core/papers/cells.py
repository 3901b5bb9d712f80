"""One result file of a table of speeds: an experiment that grows cell by cell.

The file is what `mezzo_core.papers.results` reads, with `cells` beside its `rows`: each cell's
values (one a pass, or "OOM"), the peak memory where it was counted, commit and date. It is written
again after each cell, so that a run that is killed keeps what it measured.
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
"""Called with a line about what was just measured."""
Timed = tuple[list[float] | str, dict[str, Any]]
"""The values of a cell, one a pass, or OOM; and what else is kept about it."""


@dataclass(frozen=True)
class Layout:
    """What a speed table holds, whatever was measured of it so far.

    Attributes:
        name: of its file, speed_NAME.json.
        ids: the paper's tables and claims that it speaks to.
        columns, models, groups: in the order of the paper.
        ratios: pairs of models; the first one's values over the second one's make a further row.
        unit, better: of the values.
        setting: what was measured, in words.
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
    """The result file of one layout in a folder; cells of an earlier run stay."""

    def __init__(self, layout: Layout, folder: Path, origin: Mapping[str, Any]) -> None:
        """Read what is there.

        Args:
            layout: of the table.
            folder: where the file is, or will be.
            origin: what `mezzo_core.bench.environment` says, with the commit that is measured.

        Raises:
            UserError: if the file was measured on another machine, or is none of these files.
        """
        self.layout = layout
        self.path = folder / f"speed_{layout.name}.json"
        self._origin = dict(origin)
        self.cells: dict[Key, dict[str, Any]] = {}
        if self.path.exists():
            self.cells = self._read()

    def has(self, key: Key) -> bool:
        """Tell whether this commit's cell is there already; without a commit, nobody can tell."""
        cell = self.cells.get(key)
        commit = self._origin["commit"]
        return cell is not None and commit is not None and cell["commit"] == commit

    def add(self, key: Key, values: Sequence[float] | str, **details: Any) -> None:
        """Put a cell in the place of an older one, and write the file."""
        group, model, column = key
        self.cells[key] = {
            **{"group": group, "model": model, "column": column},
            "values": values if isinstance(values, str) else [significant(v) for v in values],
            **{name: value for name, value in details.items() if value is not None},
            **{name: self._origin[name] for name in ("commit", "date")},
        }
        write_result(self.path, self.to_json())

    def to_json(self) -> dict[str, Any]:
        """Return the experiment."""
        return {
            "id": list(self.layout.ids),
            "same_setting": False,
            "setting": self.layout.setting,
            "columns": list(self.layout.columns),
            "unit": self.layout.unit,
            "better": self.layout.better,
            "rows": [row for group in self.layout.groups for row in self._rows(group)],
            **self._origin,
            "cells": list(self.cells.values()),
        }

    def _rows(self, group: str) -> list[dict[str, Any]]:
        """Return one row a model and pass, then the ratios."""
        layout, rows = self.layout, []
        for model in layout.models:
            found = [self.cells.get((group, model, column)) for column in layout.columns]
            rows += _passes([MISSING if cell is None else cell["values"] for cell in found], model)
        for first, second in layout.ratios:
            pairs = [
                [self.cells.get((group, model, column)) for model in (first, second)]
                for column in layout.columns
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
    """Measure a cell and add it; what does not fit the GPU is OOM."""
    try:
        values, details = work()
    except torch.OutOfMemoryError:
        values, details = OOM, {}
    result.add(key, values, **details)
    say(f"{result.layout.name}  {' '.join(filter(None, key))}  {describe(values, details)}")


def describe(values: list[float] | str, details: Mapping[str, Any]) -> str:
    """Write a cell as one line says it."""
    text = values if isinstance(values, str) else " ".join(f"{value:.4g}" for value in values)
    parts = (f"{k} {v:.4g}" for k, v in details.items() if isinstance(v, int | float))
    return ", ".join([text, *parts])


def significant(value: float) -> float:
    """Round to five significant digits: more would be noise."""
    return float(f"{value:.5g}")


def _passes(columns: list[Any], model: str) -> list[dict[str, Any]]:
    """Turn cells of several passes, or words, into a row a pass; none if no cell was measured."""
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
