"""Criteria of sizes rather than of orders: bounds, numbers that stay the same, powers of T."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean, median

from mezzo_core.papers.criteria import Judgement, Outcome, combine, compare_bounds
from mezzo_core.papers.measurement import How, Measurement, entries
from mezzo_core.papers.published import Claim, Table


@dataclass(frozen=True)
class Within:
    """Every number is at most a bound: errors that can only be rounding."""

    bound: float

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the largest number."""
        numbers = [float(entry.value) for entry in ours.entries]
        if not numbers:
            return Judgement(Outcome.NOT_SETTLED, f"{ours.unit} not measured: {ours.setting}")
        agrees = all(number <= self.bound for number in numbers)  # a NaN is not
        found = f"at most {self.bound:.0e}" if agrees else f"up to {max(numbers):.1e}"
        return Judgement(
            Outcome.AGREES if agrees else Outcome.DIFFERS,
            f"{ours.unit} {found}: {ours.setting}",
            tuple(f"{entry.model}: {float(entry.value):.1e}" for entry in ours.entries),
        )


@dataclass(frozen=True)
class Steady:
    """The numbers of a model are about the same in all columns: the highest over the lowest.

    So something that was divided by f(T) grows as f(T).
    """

    bound: float = 1.25
    models: tuple[str, ...] = ()  # empty: all
    columns: tuple[str, ...] = ()

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the ratio of each seed or pass with the bound."""
        outcomes, words = [], []
        for group, model in ours.rows:
            if self.models and model not in self.models:
                continue
            found = [ours.by_seed(model, c, group) for c in self.columns or ours.columns]
            cells = [cell for cell in found if cell]
            shared = [s for s in ours.seeds if all(s in cell for cell in cells)]
            if len(cells) < 2 or not shared:
                continue
            every = ([cell[s] for cell in cells] for s in shared)
            # `max` and `min` pass over a NaN that does not come first.
            spreads = [max(v) / min(v) if all(map(math.isfinite, v)) else math.nan for v in every]
            outcomes.append(compare_bounds(spreads, 0.0, self.bound, ours.kind))
            words.append(f"{model} {median(spreads):.3g}")
        where = f"highest over lowest, {ours.setting} (bound {self.bound:g})"
        return Judgement(combine(outcomes), f"{where}: {', '.join(words) or 'not measured'}")


@dataclass(frozen=True)
class Growth:
    """A model's time grows as a power of T within bounds, from the first to the last column."""

    powers: Mapping[str, tuple[float, float]]  # by model
    columns: tuple[str, ...]  # lengths T

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the slope of each pass on logarithmic axes."""
        outcomes, words = [], []
        for model, (low, high) in self.powers.items():
            known = [c for c in self.columns if ours.by_seed(model, c)]
            if len(known) < 2:
                continue
            first, last = (ours.by_seed(model, c) for c in (known[0], known[-1]))
            times = math.log(int(known[-1]) / int(known[0]))
            powers = [math.log(last[i] / first[i]) / times for i in first.keys() & last.keys()]
            outcomes.append(compare_bounds(powers, low, high, ours.kind))
            bounds = f"expected {low:g} to {high:g}, T from {known[0]} to {known[-1]}"
            words.append(f"{model} as T^{fmean(powers):.2f} ({bounds})")
        return Judgement(combine(outcomes), f"grows: {', '.join(words) or 'not measured'}")


def growing(
    rows: Mapping[str, tuple[Callable[[int], float], Callable[[int], float]]],
    setting: str,
    lengths: tuple[int, ...],
) -> Measurement:
    """Return a row of f(T) / g(T) for each name, which is `Steady` if f grows as g.

    Args:
        rows: f and g by the name of what grows and how.
        setting: what is counted, in words.
        lengths: T.
    """
    values = {name: [f(T) / g(T) for T in lengths] for name, (f, g) in rows.items()}
    columns = tuple(map(str, lengths))
    return Measurement(entries(values, columns), columns, f"{setting}, divided as said", How.PAPER)
