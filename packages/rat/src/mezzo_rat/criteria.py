"""Criteria that RAT's claims need besides core's: they look at a measurement in another way."""

from dataclasses import dataclass, replace

from mezzo_core.papers.criteria import (
    Criterion,
    InOrder,
    Judgement,
    Outcome,
    Ratio,
    about,
    combine,
    describe_place,
    pair_seeds,
)
from mezzo_core.papers.measurement import Entry, Measurement
from mezzo_core.papers.published import Claim, Table


@dataclass(frozen=True)
class Transposed:
    """A criterion about a measurement whose models and columns are exchanged.

    So the numbers of one model can be compared with each other.
    """

    criterion: Criterion

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Exchange models and columns, and judge."""
        turned = tuple(replace(e, model=e.column, column=e.model) for e in ours.entries)
        columns = tuple(dict.fromkeys(entry.column for entry in turned))
        return self.criterion(printed, replace(ours, entries=turned, columns=columns))


@dataclass(frozen=True)
class Divided:
    """A criterion about the ratios of two models' numbers, which are one model "ratio"."""

    above: str
    below: str
    criterion: Criterion

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Divide, seed by seed, and judge."""
        ratios = tuple(
            Entry("ratio", column, a / b, group, seed)
            for group in ours.groups
            for column in ours.columns
            for seed, (a, b) in enumerate(pair_seeds(ours, self.above, self.below, column, group))
        )
        judged = self.criterion(printed, replace(ours, entries=ratios, better="higher"))
        return replace(judged, summary=f"{self.above} over {self.below}: {judged.summary}")


def grows(above: str, below: str, columns: tuple[str, ...]) -> Criterion:
    """Return the criterion that the ratio of two models grows from column to column."""
    return Divided(above, below, Transposed(InOrder(columns[::-1])))


def change(model: str, first: str, last: str, bounds: tuple[float, float]) -> Criterion:
    """Return the criterion that a model's number in the last column over the first is in bounds."""
    what = f"{model}, {describe_place('', last)} over {describe_place('', first)}"
    return Transposed(Ratio(last, first, {model: bounds}, what=what))


def one_gpu_takes_as_long_as_four(printed: Table | Claim, ours: Measurement) -> Judgement:
    """Each model's hours on one GPU are four times about 5 to 14, the hours on four GPUs."""
    column = "Hours on one GPU for 15B tokens"
    low, high = about(4 * 5)[0], about(4 * 14)[1]
    hours = {model: ours.by_seed(model, column).values() for _, model in ours.rows}
    inside = [low <= value <= high for values in hours.values() for value in values]
    return Judgement(
        combine([Outcome.AGREES if each else Outcome.DIFFERS for each in inside]),
        f"expected {low:g} to {high:g} hours on one GPU: "
        + ", ".join(f"{model} {ours.typical(model, column)}" for model in hours),
    )
