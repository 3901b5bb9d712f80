"""Criteria that this paper's claims need besides core's: accuracies in points, and what fits."""

from dataclasses import dataclass
from statistics import fmean

from mezzo_core.papers.criteria import Judgement, Outcome, combine
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Table


@dataclass(frozen=True)
class NearPrinted:
    """Every accuracy that we measured is within so many points of the printed one."""

    points: float

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the mean over the seeds of each cell."""
        assert isinstance(printed, Table)
        wrong, details = [], []
        for column in printed.columns:
            for model, theirs in printed.column(column).items():
                if found := ours.by_seed(model, column):
                    mean = fmean(found.values())
                    details.append(f"{model} at {column}: printed {theirs:g}, ours {mean:.4g}")
                    if abs(mean - theirs) > self.points:
                        wrong.append(details[-1])
        near = f"of {len(details)} accuracies, {len(details) - len(wrong)} are within "
        summary = f"{near}{self.points:g} points of the printed ones"
        if wrong:
            summary += f" (not {'; '.join(wrong[:3])})"
        outcome = Outcome.AGREES if details else Outcome.NOT_SETTLED
        return Judgement(Outcome.DIFFERS if wrong else outcome, summary, tuple(details))


@dataclass(frozen=True)
class AtLeast:
    """A model's accuracy is at least so high in each of these columns, all of them measured."""

    bound: float
    model: str
    columns: tuple[str, ...]

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the mean over the seeds of each column."""
        found = {c: fmean(v.values()) for c in self.columns if (v := ours.by_seed(self.model, c))}
        missing = [column for column in self.columns if column not in found]
        lower = [f"{value:.4g} at {c}" for c, value in found.items() if not value >= self.bound]
        said = f"{self.model} has at least {self.bound:g}"
        if lower:
            return Judgement(Outcome.DIFFERS, f"not everywhere: {said}, but {', '.join(lower)}")
        if missing:
            return Judgement(Outcome.NOT_SETTLED, f"{said}, but was not measured at {missing}")
        return Judgement(Outcome.AGREES, f"{said} at {', '.join(self.columns)}")


@dataclass(frozen=True)
class Gap:
    """One model's accuracy minus another's, in points, is in bounds in each of these columns."""

    first: str
    second: str
    columns: tuple[str, ...]
    low: float
    high: float

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the means over the seeds in those of the columns that were measured."""
        outcomes, words = [], []
        for column in self.columns:
            a, b = (ours.by_seed(model, column) for model in (self.first, self.second))
            if a and b:
                gap = fmean(a.values()) - fmean(b.values())
                inside = self.low <= gap <= self.high
                outcomes.append(Outcome.AGREES if inside else Outcome.DIFFERS)
                words.append(f"{gap:+.3g} at {column}")
        asked = f"{self.first} minus {self.second} in points ({self.low:g} to {self.high:g} asked)"
        return Judgement(combine(outcomes), f"{asked}: {', '.join(words) or 'not measured'}")


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
