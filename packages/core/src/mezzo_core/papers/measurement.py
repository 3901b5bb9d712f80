"""Numbers that we measured, with their setting and the machine that they come from.

A result file (`packages/PAPER/results/MACHINE/NAME.json`) holds one measurement; it is written by
`mezzo_core.bench.result`. The numbers of a `reproduce` run, counted, timed or from tiny trainings,
have the same form.
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.papers.published import Value


class How(str, Enum):
    """How a table or claim was run."""

    PAPER = "the paper's setting"
    OTHER_HARDWARE = "other hardware"
    """In full, as the paper describes it, but not on its machine."""
    SCALED_DOWN = "scaled down"
    NOT_ATTEMPTED = "not attempted"


@dataclass(frozen=True)
class Entry:
    """One number: of a model, in a column, for one seed (of a speed: in one pass).

    A value may be a word, such as "OOM". `details` are further results of the same run.
    """

    model: str
    column: str
    value: Value
    group: str = ""
    seed: int = 0
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Measurement:
    """Numbers that can be compared with each other: of one setting, machine and commit.

    Attributes:
        entries: the numbers.
        columns: names of the columns, in the paper's order.
        setting: what was measured, in words.
        how: how this relates to the paper's own setting.
        unit: of the values.
        better: "lower" or "higher".
        kind: "count", "speed", "training" or "recall".
        origin: gpu, torch, commit, date and the like; empty for numbers of this run.
        source: the result file that it was read from, such as "nvidia-h200/speed_table6".
    """

    entries: tuple[Entry, ...]
    columns: tuple[str, ...]
    setting: str
    how: How = How.SCALED_DOWN
    unit: str = ""
    better: str = "lower"
    kind: str = "count"
    origin: Mapping[str, Any] = field(default_factory=dict)
    source: str = ""

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The (group, model) of each row, in the order of the entries."""
        return list(dict.fromkeys((entry.group, entry.model) for entry in self.entries))

    @property
    def groups(self) -> list[str]:
        """The groups of rows, in the order of the entries."""
        return list(dict.fromkeys(entry.group for entry in self.entries))

    def cell(self, model: str, column: str, group: str = "") -> list[Entry]:
        """Return the entries of one cell, one for each seed, in the order of the seeds."""
        found = [e for e in self.entries if (e.model, e.column, e.group) == (model, column, group)]
        return sorted(found, key=lambda entry: entry.seed)

    def by_seed(self, model: str, column: str, group: str = "") -> dict[int, float]:
        """Return the numbers of one cell by their seeds; empty if the cell has words."""
        values = {entry.seed: entry.value for entry in self.cell(model, column, group)}
        if any(isinstance(value, str) for value in values.values()):
            return {}
        return {seed: float(value) for seed, value in values.items()}

    def typical(self, model: str, column: str, group: str = "") -> Value | None:
        """Return the mean over seeds, or the median over passes; a word as it is, None if empty."""
        values = [entry.value for entry in self.cell(model, column, group)]
        words = [value for value in values if isinstance(value, str)]
        if not values or words:
            return words[0] if words else None
        if len(values) == 1:
            return values[0]
        middle = statistics.median if self.kind == "speed" else statistics.fmean
        return middle(map(float, values))

    def spread(self, model: str, column: str, group: str = "") -> float | None:
        """Return the highest minus the lowest value of a cell; None for fewer than two numbers."""
        values = self.by_seed(model, column, group).values()
        return max(values) - min(values) if len(values) > 1 else None

    @property
    def seeds(self) -> list[int]:
        """The seeds of all entries, in order."""
        return sorted({entry.seed for entry in self.entries})


def entries(
    values: Mapping[str, Mapping[str, Value]] | Mapping[str, Sequence[Value]],
    columns: Sequence[str],
    group: str = "",
) -> tuple[Entry, ...]:
    """Return entries for numbers without seeds, given by model, one for each column."""
    return tuple(
        Entry(model, column, value, group)
        for model, row in values.items()
        for column, value in (
            row.items() if isinstance(row, Mapping) else zip(columns, row, strict=True)
        )
    )


def read_results(folder: Path) -> dict[str, Measurement]:
    """Read the result files below a `results` folder, by "MACHINE/NAME".

    Raises:
        UserError: if a file is no result; the message names the file and the error.
    """
    found = ((path, path.parent.name) for path in sorted(folder.glob("*/*.json")))
    return {f"{machine}/{path.stem}": read_result(path) for path, machine in found}


def read_result(path: Path) -> Measurement:
    """Read one result file.

    Raises:
        UserError: if it is no result; the message names the file and the error.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return Measurement(
            entries=tuple(_entries(content)),
            columns=tuple(content["columns"]),
            setting=content["setting"],
            how=How(content["how"]),
            unit=content["unit"],
            better=content["better"],
            kind=content["kind"],
            origin={key: content[key] for key in ("gpu", "cpu", "torch", "commit", "date")}
            | {key: content.get(key) for key in ("triton", "driver", "cuda", "ptxas")},
            source=f"{path.parent.name}/{path.stem}",
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path}: no result file: {error!r}") from error


def _entries(content: Mapping[str, Any]) -> Iterator[Entry]:
    fields = ("model", "column", "value", "group", "seed")
    for entry in content["entries"]:
        known = {name: entry[name] for name in fields if name in entry}
        details = {name: value for name, value in entry.items() if name not in fields}
        if entry["column"] not in content["columns"]:
            raise ValueError(f"no column is named {entry['column']!r}")
        yield Entry(**known, details=details)
