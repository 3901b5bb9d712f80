"""Numbers that we measured, with their setting and the machine that they come from.

A result file (`packages/PAPER/results/MACHINE/NAME.json`) holds one measurement; it is written by
`result_file`. The numbers of a `reproduce` run, counted, timed or from tiny trainings, have the
same form.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from mezzo_core.reproduction.outcomes import TRAINED
from mezzo_core.reproduction.published import Value
from mezzo_core.reproduction.result_file import Entry as Entry
from mezzo_core.reproduction.result_file import best_of, read_file


class How(str, Enum):
    """How a table or claim was run, the nearest to the paper first."""

    PAPER = "the paper's setting"
    OTHER_HARDWARE = "other hardware"
    """In full, as the paper describes it, but not on its machine."""
    SCALED_DOWN = "scaled down"
    NOT_ATTEMPTED = "not attempted"


@dataclass(frozen=True)
class Measurement:
    """Numbers that can be compared with each other: of one setting, machine and commit."""

    entries: tuple[Entry, ...]
    columns: tuple[str, ...]  # in the paper's order
    setting: str  # what was measured, in words
    how: How = How.SCALED_DOWN
    unit: str = ""
    better: str = "lower"  # or "higher"
    kind: str = "count"  # or that of a `Header`
    title: str = ""
    origin: Mapping[str, Any] = field(default_factory=dict)  # gpu, commit, ...; empty: of this run
    source: str = ""  # the result file, such as "nvidia-h200/speed_table6"

    @property
    def is_of_this_run(self) -> bool:
        """Whether this run trained or timed it, and no committed result holds it."""
        return not self.source and self.kind not in ("count", "test")

    @property
    def machine(self) -> str:
        """The first part of `source`, the folder of a machine's result files."""
        return self.source.split("/")[0]

    @property
    def rows(self) -> list[tuple[str, str]]:
        """The (group, model) of each row, in the order of the entries."""
        return list(dict.fromkeys((entry.group, entry.model) for entry in self.entries))

    @property
    def groups(self) -> list[str]:
        """The groups of rows, in the order of the entries."""
        return list(dict.fromkeys(entry.group for entry in self.entries))

    @property
    def seeds(self) -> list[int]:
        """The seeds of all entries, in order."""
        return sorted({entry.seed for entry in self.entries})

    def cell(self, model: str, column: str, group: str = "") -> list[Entry]:
        """Return the entries of one cell, one for each seed, in the order of the seeds."""
        return self._cells.get((model, column, group), [])

    @cached_property
    def _cells(self) -> dict[tuple[str, str, str], list[Entry]]:
        found: dict[tuple[str, str, str], list[Entry]] = {}
        for entry in sorted(self.entries, key=lambda entry: entry.seed):
            found.setdefault((entry.model, entry.column, entry.group), []).append(entry)
        return found

    def by_seed(
        self, model: str, column: str, group: str = "", detail: str = ""
    ) -> dict[int, float]:
        """Return the numbers of one cell, or a detail of it, by seed; empty if it has words."""
        cell = self.cell(model, column, group)
        values = {e.seed: e.details.get(detail, "") if detail else e.value for e in cell}
        numbers = {s: float(v) for s, v in values.items() if not isinstance(v, str)}
        return numbers if len(numbers) == len(values) else {}

    def typical(self, model: str, column: str, group: str = "") -> Value | None:
        """Return the mean over seeds, or the median over passes; a word as it is, None if empty."""
        values = [entry.value for entry in self.cell(model, column, group)]
        words = [value for value in values if isinstance(value, str)]
        if words or len(values) < 2:
            return next(iter(words or values), None)
        return self.middle([float(value) for value in values])

    def middle(self, numbers: Sequence[float]) -> float:
        """Return the mean over seeds, or the median over passes."""
        return statistics.fmean(numbers) if self.kind in TRAINED else statistics.median(numbers)

    def spread(self, model: str, column: str, group: str = "") -> float | None:
        """Return the highest minus the lowest value of a cell; None for fewer than two numbers."""
        values = self.by_seed(model, column, group).values()
        return max(values) - min(values) if len(values) > 1 else None


def entries(
    values: Mapping[str, Sequence[Value]], columns: Sequence[str], group: str = ""
) -> tuple[Entry, ...]:
    """Return entries for numbers without seeds, given by model, one for each column."""
    return tuple(
        Entry(model, column, value, group)
        for model, row in values.items()
        for column, value in zip(columns, row, strict=True)
    )


def pick(ours: Measurement, columns: Mapping[str, str]) -> Measurement | None:
    """Return some columns under other names; None if none of them was measured."""
    found = tuple(replace(e, column=columns[e.column]) for e in ours.entries if e.column in columns)
    if not found:
        return None
    kept = {old: new for old, new in columns.items() if old in ours.columns}
    words = "; ".join(f"{old} as {new}" for old, new in kept.items())
    setting = f"{words}; {ours.setting}"
    return replace(ours, entries=found, columns=tuple(kept.values()), setting=setting)


def without_first_seed(ours: Measurement) -> Measurement:
    """Leave out the seed that chose the settings, as `at_best` does: it was lucky there."""
    first, *others = ours.seeds
    if not others:
        return ours
    setting = f"seed {first}, which chose the rates, is left out; {ours.setting}"
    kept = tuple(entry for entry in ours.entries if entry.seed != first)
    return replace(ours, entries=kept, setting=setting)


def at_best(ours: Measurement, name: str) -> Measurement:
    """Return each model's numbers in the column that is its best with the first seed.

    They stand in one column, `name`. The first seed is left out where there are others: it was
    lucky there, maybe more so for one model than for another. The columns of `ours` are settings
    that were tried.
    """
    first, found = ours.seeds[0], []
    for group, model in ours.rows:
        cells = {column: ours.by_seed(model, column, group) for column in ours.columns}
        tried = {column: cell[first] for column, cell in cells.items() if first in cell}
        if best := best_of(tried, ours.better):
            cell = ours.cell(model, best, group)
            others = [entry for entry in cell if entry.seed != first]
            found += [replace(entry, column=name) for entry in others or cell]
    chosen = (
        f"each model at the rate of {', '.join(ours.columns)} that is its best with seed {first}"
    )
    setting = f"{chosen}, which is left out; {ours.setting}"
    return replace(ours, entries=tuple(found), columns=(name,), setting=setting)


def read_results(folder: Path) -> dict[str, Measurement]:
    """Read the result files below a `results` folder, by "MACHINE/NAME".

    Raises:
        UserError: if a file is no result; the message names the file and the error.
    """
    found = [read_result(path) for path in sorted(folder.glob("*/*.json"))]
    return {each.source: each for each in found}


def read_result(path: Path) -> Measurement:
    """Read one result file; its entries come in the order of the header's groups and models.

    Raises:
        UserError: if it is no result; the message names the file and the error.
    """
    header, content, found = read_file(path)
    groups, models = header.groups or ("",), header.models
    found.sort(key=lambda entry: (groups.index(entry.group), models.index(entry.model)))
    origin = ("gpu", "cpu", "torch", "commit", "date", "triton", "driver", "cuda", "ptxas")
    return Measurement(
        entries=tuple(found),
        columns=header.columns,
        how=How(header.how),
        origin={name: content.get(name) for name in origin},
        source=f"{path.parent.name}/{path.stem}",
        **{key: content[key] for key in ("setting", "unit", "better", "kind", "title")},
    )
