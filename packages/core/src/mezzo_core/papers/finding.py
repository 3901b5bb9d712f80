"""What a reproduction found about one table or claim: a status, a sentence, and our numbers."""

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
    """One line of ours: `runs` has one tuple of values a seed (one in all without seeds)."""

    model: str
    runs: tuple[tuple[Value, ...], ...]
    group: str = ""
    seeds: tuple[int, ...] = ()
    """Of the runs, where models may differ in them."""

    @property
    def values(self) -> tuple[Value, ...]:
        """The mean over seeds, column by column; a cell without a number stays as it is."""
        return tuple(
            cells[0]
            if _has_words(cells) or len(cells) == 1
            else sum(map(float, cells)) / len(cells)
            for cells in zip(*self.runs, strict=True)
        )

    @property
    def spread(self) -> tuple[float | None, ...]:
        """The highest minus the lowest over seeds; None with one seed, or where no number is."""
        return tuple(
            None if _has_words(cells) or len(cells) == 1 else max(cells) - min(cells)
            for cells in zip(*self.runs, strict=True)
        )


def _has_words(cells: Sequence[Value]) -> bool:
    return any(isinstance(cell, str) for cell in cells)


@dataclass(frozen=True)
class Measurement:
    """Numbers that we measured, with the setting that they hold for.

    `device` is a GPU's own name or "CPU"; empty versions, commit and date are those of the report.
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
        """Return one column by model, one number a seed, without cells that hold no number."""
        rows = self._numbers(column, group)
        return {model: tuple(value for _, value in runs) for model, runs in rows.items()}

    def paired(
        self, column: str, group: str, models: Collection[str]
    ) -> dict[str, tuple[float, ...]]:
        """Return `samples` of those of the models that are there, over the seeds all of them have.

        It is empty where they have no seed in common.
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
        """Return each model's pairs of a seed and a number; seeds count on where none are named."""
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

    A check (`kind="check"`) is a fact that the paper states in its method, not in its numbers:
    a limit, an equality of two forms.
    """

    id: str
    kind: Kind
    status: Status
    summary: str
    measurements: tuple[Measurement, ...] = ()
    details: tuple[str, ...] = ()


def check_complete(published: Published, findings: list[Finding], only: set[str] | None) -> None:
    """Raise a ValueError unless each table and claim (of `only`) has exactly one finding."""
    found = [finding.id for finding in findings if finding.kind != "check"]
    wanted = set(published.ids) if only is None else set(published.ids) & only
    missing, invented = wanted - set(found), set(found) - set(published.ids)
    repeated = {id for id in found if found.count(id) > 1}
    if missing or invented or repeated:
        raise ValueError(
            f"findings: missing {sorted(missing)}, invented {sorted(invented)}, "
            f"repeated {sorted(repeated)}"
        )
