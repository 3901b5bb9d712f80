"""Criteria that this paper's claims need besides core's: accuracies in points, and what fits."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean

from mezzo_core.papers.criteria import Judgement, Outcome, combine, compare_bounds, pair_seeds
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Table


@dataclass(frozen=True)
class NearPrinted:
    """Every accuracy that we measured is within so many points of the printed one."""

    points: float

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Hold each cell that was measured to its bounds."""
        assert isinstance(printed, Table)
        points = self.points
        cells = (
            (f"{model} at {c}, printed {theirs:g}", found, theirs - points, theirs + points)
            for c in printed.columns
            for model, theirs in printed.column(c).items()
            if (found := list(ours.by_seed(model, c).values()))
        )
        asked = f"accuracies within {points:g} points of the printed ones"
        return _judge(asked, cells, ours.kind)


@dataclass(frozen=True)
class AtLeast:
    """A model's accuracy is at least so high in each of these columns, all of them measured."""

    bound: float
    model: str
    columns: tuple[str, ...]

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Hold each column to the bound."""
        found = {c: list(ours.by_seed(self.model, c).values()) for c in self.columns}
        cells = ((c, values, self.bound, math.inf) for c, values in found.items())
        return _judge(f"{self.model}, at least {self.bound:g}", cells, ours.kind)


@dataclass(frozen=True)
class Gap:
    """One model's accuracy minus another's, in points, is at least so much in these columns."""

    first: str
    second: str
    columns: tuple[str, ...]
    bound: float

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Hold the gaps of the seeds to the bound in those of the columns that were measured."""
        cells = (
            (c, [a - b for a, b in paired], self.bound, math.inf)
            for c in self.columns
            if (paired := pair_seeds(ours, self.first, self.second, c, ""))
        )
        asked = f"{self.first} minus {self.second} in points, at least {self.bound:g}"
        return _judge(asked, cells, ours.kind)


@dataclass(frozen=True)
class Runs:
    """A model has a number in this column: it was not too large for the GPU."""

    model: str
    column: str

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Look for a word, such as OOM, in the place of a number."""
        cell = ours.cell(self.model, self.column)
        words = [str(entry.value) for entry in cell if isinstance(entry.value, str)]
        outcome = Outcome.AGREES if cell else Outcome.NOT_SETTLED
        found = words[0] if words else "it runs" if cell else "not measured"
        summary = f"{self.model} at {self.column}: {found}"
        return Judgement(Outcome.DIFFERS if words else outcome, summary)


def _judge(
    asked: str, cells: Iterable[tuple[str, Sequence[float], float, float]], kind: str
) -> Judgement:
    """Hold the values of each cell, one for each seed, to its low and high bound."""
    found: dict[Outcome, list[str]] = {}
    for place, values, low, high in cells:
        mean = f"{fmean(values):.4g}" if values else "not measured"
        found.setdefault(compare_bounds(values, low, high, kind), []).append(f"{place}: {mean}")
    parts = (
        f"{outcome.value} in {len(said)} ({'; '.join(said[:3])}{'; ...' if len(said) > 3 else ''})"
        for outcome, said in found.items()
    )
    details = tuple(f"{each}, {o.value}" for o, said in found.items() for each in said)
    return Judgement(combine([*found]), f"{asked}: {', '.join(parts) or 'not measured'}", details)
