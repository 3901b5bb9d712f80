"""The finding of a reproduction about one table or claim: a status, a sentence and our numbers."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from mezzo_core.papers.published import Published, Value

Kind = Literal["table", "claim", "check"]


class Status(str, Enum):
    """How far a table or claim was reproduced."""

    REPRODUCED = "reproduced"
    DIFFERS = "differs"
    SCALED_DOWN = "scaled down"
    NOT_ATTEMPTED = "not attempted"


@dataclass(frozen=True)
class ResultRow:
    """One line of our numbers: `runs` has a tuple of values for each seed, or one without seeds."""

    model: str
    runs: tuple[tuple[Value, ...], ...]
    group: str = ""
    seeds: tuple[int, ...] = ()
    """The seeds of `runs`; given if the models may have different seeds."""

    @property
    def values(self) -> tuple[Value, ...]:
        """The mean over the seeds of each column; a cell with words is kept unchanged."""
        return tuple(
            cells[0]
            if _has_words(cells) or len(cells) == 1
            else sum(map(float, cells)) / len(cells)
            for cells in zip(*self.runs, strict=True)
        )

    @property
    def spread(self) -> tuple[float | None, ...]:
        """The highest minus the lowest value over the seeds of each column.

        None for a single seed, or for cells with words.
        """
        return tuple(
            None if _has_words(cells) or len(cells) == 1 else max(cells) - min(cells)
            for cells in zip(*self.runs, strict=True)
        )


def _has_words(cells: Sequence[Value]) -> bool:
    return any(isinstance(cell, str) for cell in cells)


@dataclass(frozen=True)
class Measurement:
    """Numbers that we measured, with their setting.

    `device` is a GPU's own name or "CPU". An empty version, commit or date stands for the report's.
    """

    columns: tuple[str, ...]
    rows: tuple[ResultRow, ...]
    setting: str
    unit: str = ""
    seeds: tuple[int, ...] = ()
    device: str = "CPU"
    torch: str = ""
    triton: str = ""
    commit: str = ""
    date: str = ""

    def samples(self, column: str, group: str = "") -> dict[str, tuple[float, ...]]:
        """Return a column by model, one number a seed; models with words in it are left out."""
        rows = self._numbers(column, group)
        return {model: tuple(value for _, value in runs) for model, runs in rows.items()}

    def paired(
        self, column: str, group: str, models: Collection[str]
    ) -> dict[str, tuple[float, ...]]:
        """Return `samples` of the given models, for the seeds that all of them have in common.

        Models that were not measured are left out. Without a common seed the result is empty.
        """
        rows = self._numbers(column, group)
        rows = {model: runs for model, runs in rows.items() if model in models}
        if not rows:
            return {}
        shared = set.intersection(*({seed for seed, _ in runs} for runs in rows.values()))
        return {
            model: tuple(value for seed, value in runs if seed in shared)
            for model, runs in rows.items()
            if shared
        }

    def _numbers(self, column: str, group: str) -> dict[str, list[tuple[int, float]]]:
        """Return each model's (seed, number) pairs; without seeds, runs are numbered from 0."""
        place = self.columns.index(column)
        return {
            row.model: [
                (seed, float(run[place]))
                for seed, run in zip(row.seeds or range(len(row.runs)), row.runs, strict=True)
            ]
            for row in self.rows
            if row.group == group and not _has_words([run[place] for run in row.runs])
        }


@dataclass(frozen=True)
class Finding:
    """The outcome for one table or claim of the paper, or for one check of our own.

    A check (`kind="check"`) tests a statement of the paper's method, such as a limit or the
    equality of two forms.
    """

    id: str
    kind: Kind
    status: Status
    summary: str
    measurements: tuple[Measurement, ...] = ()
    details: tuple[str, ...] = ()


def check_complete(published: Published, findings: list[Finding], only: set[str] | None) -> None:
    """Raise a ValueError unless each table and claim (in `only`) has exactly one finding."""
    found = [finding.id for finding in findings if finding.kind != "check"]
    wanted = set(published.ids) if only is None else set(published.ids) & only
    missing, invented = wanted - set(found), set(found) - set(published.ids)
    repeated = {id for id in found if found.count(id) > 1}
    if missing or invented or repeated:
        raise ValueError(
            f"findings: missing {sorted(missing)}, invented {sorted(invented)}, "
            f"repeated {sorted(repeated)}"
        )
