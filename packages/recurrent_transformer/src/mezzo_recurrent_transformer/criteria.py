"""Criteria that this paper's claims need besides core's."""

import math
from dataclasses import dataclass, replace
from statistics import fmean

from mezzo_core.papers.criteria import (
    Criterion,
    Judgement,
    Outcome,
    Pair,
    compare_order,
    is_settled,
    judge_pairs,
)
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Row, Table

LAYERS = "Layers"


@dataclass(frozen=True)
class ByLayers:
    """A criterion about a printed table whose models are told apart by their layers too.

    The table's columns Layers and Width say what a model is, so they become part of its name.
    """

    criterion: Criterion

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Name the printed rows as ours are named, and judge."""
        assert isinstance(printed, Table)
        return self.criterion(by_layers(printed), ours)


def by_layers(table: Table) -> Table:
    """Return the table with rows such as "Transformer, 6 layers" and the measured columns alone."""
    kept = [i for i, name in enumerate(table.columns) if name not in (LAYERS, "Width")]
    place = table.columns.index(LAYERS)
    rows = (
        Row(with_layers(row.model, row.values[place]), tuple(row.values[i] for i in kept))
        for row in table.rows
    )
    return replace(table, columns=tuple(table.columns[i] for i in kept), rows=tuple(rows))


def with_layers(model: str, layers: object) -> str:
    """Return the name of a model with so many layers."""
    return f"{model}, {layers} layers"


@dataclass(frozen=True)
class BestColumn:
    """A model's best column is this one; where only the other has no number, it is worse."""

    model: str
    column: str

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare it with each other column, over the seeds."""
        measured = [c for c in ours.columns if ours.cell(self.model, c)]
        if self.column not in measured:  # no number is not yet a worse one
            return Judgement(Outcome.NOT_SETTLED, f"{self.model} at {self.column}: not measured")
        others = [c for c in measured if c != self.column]
        pairs = [pair for c in others for pair in self._compare(ours, c)]
        judged = judge_pairs(pairs)
        return replace(judged, summary=f"{self.model} at {self.column}: {judged.summary}")

    def _compare(self, ours: Measurement, other: str) -> list[Pair]:
        columns = (self.column, other)
        numbers = [bool(ours.by_seed(self.model, c)) for c in columns]
        if all(numbers):
            swapped = (replace(e, model=e.column, column=e.model) for e in ours.entries)
            turned = replace(ours, entries=tuple(swapped), columns=(self.model,))
            return list(compare_order(columns, turned, self.model))
        outcome = Outcome.AGREES if numbers[0] else Outcome.DIFFERS
        if any(len(ours.cell(self.model, c)) < 2 for c in columns):
            outcome = Outcome.NOT_SETTLED
        return [Pair(*columns, self.model, math.inf, None, outcome)]


@dataclass(frozen=True)
class Trains:
    """A model has a number in every column: no training of it diverged, of two seeds or more."""

    model: str

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Look for words in the place of numbers."""
        cells = {c: ours.cell(self.model, c) for c in ours.columns}
        failed = [c for c, cell in cells.items() if any(isinstance(e.value, str) for e in cell)]
        few = [c for c, cell in cells.items() if len(cell) < 2]
        outcome = Outcome.NOT_SETTLED if few else Outcome.AGREES
        said = f"diverges at {', '.join(failed)}" if failed else "trains"
        said += f" (not two seeds at {', '.join(few)})" if few else ""
        return Judgement(
            Outcome.DIFFERS if set(failed) - set(few) else outcome,
            f"{self.model} {said}",
        )


@dataclass(frozen=True)
class BetterAtBest:
    """One model at its best column is better than another at its best, over the seeds."""

    better: str
    worse: str

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the best columns by their means."""
        sign = 1 if ours.better == "higher" else -1
        best = []
        for model in (self.better, self.worse):
            known = [found for c in ours.columns if (found := ours.by_seed(model, c))]
            if not known:
                return Judgement(Outcome.NOT_SETTLED, f"{model} has no number")
            best.append(max(known, key=lambda found: sign * fmean(found.values())))
        first, second = best
        gaps = [sign * (first[s] - second[s]) for s in sorted(first.keys() & second.keys())]
        settled = Outcome.AGREES if gaps and fmean(gaps) > 0 else Outcome.DIFFERS
        means = [fmean(found.values()) for found in best]
        return Judgement(
            settled if is_settled(gaps) else Outcome.NOT_SETTLED,
            f"at their best rates {self.better} has {means[0]:.4g} and {self.worse} {means[1]:.4g}",
        )
