"""Criteria: what a measurement must show for a claim to agree, written before it is measured.

A criterion is called with the printed table or claim and with our numbers, and returns a
`Judgement`. The criteria here are dataclasses; a paper may write its own as functions.

Noise: an order is tested pair by pair, on neighbours, over the seeds that both have. A pair is
settled if its gap differs from zero by a two-sided paired t-test at the 5% level. With three seeds
the mean gap must be 2.5 times the gaps' standard deviation, with two seeds 9 times. With one seed
no pair is settled. Counts have no noise (`exact`).
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Table, Value

# Student's t, two-sided 5%, for 1 to 9 degrees of freedom; the last is used for more seeds too.
T_CRITICAL = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Outcome(str, Enum):
    """What came out."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_SETTLED = "not settled"


@dataclass(frozen=True)
class Judgement:
    """What came out, in one clause, with a line of text for each comparison behind it."""

    outcome: Outcome
    summary: str
    details: tuple[str, ...] = ()


Criterion = Callable[[Table | Claim, Measurement], Judgement]


@dataclass(frozen=True)
class InOrder:
    """The names stand in this order, best first, in every measured column.

    Attributes:
        names: best first; empty: the claim's own ordering. Names without numbers are skipped.
        columns, groups: those that count; empty: all.
        exact: the numbers have no noise.
    """

    names: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    exact: bool = False

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the neighbours of the order in each column."""
        names = self.names or (printed.ordering if isinstance(printed, Claim) else ())
        pairs = [
            pair
            for group in self.groups or ours.groups
            for column in self.columns or ours.columns
            for pair in compare_order(names, ours, column, group, exact=self.exact)
        ]
        return judge_pairs(pairs)


@dataclass(frozen=True)
class AsPrinted:
    """In every column that we measured too, the models stand in the printed order.

    Neighbours with equal printed numbers are not compared. `columns` and `groups` limit what
    counts; `across_groups` compares the rows of all groups with each other.
    """

    columns: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    across_groups: bool = False

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare each column with that of the printed table."""
        assert isinstance(printed, Table)
        pairs: list[Pair] = []
        for column in self.columns or printed.columns:
            better = printed.direction(column)
            if column not in ours.columns or better not in ("lower", "higher"):
                continue
            for name, group, values in self._columns(printed, column):
                if name in ours.groups or self.across_groups:
                    order = sorted(values, key=values.__getitem__, reverse=better == "higher")
                    pairs += compare_order(
                        order, ours, column, group, better=better, printed=values
                    )
        return judge_pairs(pairs)

    def _columns(
        self, printed: Table, column: str
    ) -> Iterator[tuple[str, str | None, dict[str, float]]]:
        """Yield (name, our group or None for any, the printed numbers) for each list to compare."""
        groups = dict.fromkeys(row.group for row in printed.rows)
        if self.across_groups:
            yield "", None, {m: v for g in groups for m, v in printed.column(column, g).items()}
            return
        for group in self.groups or groups:
            yield group, group, printed.column(column, group)


@dataclass(frozen=True)
class Ratio:
    """One model's number over another's lies within bounds, in the columns that are named.

    Attributes:
        above, below: the models that are divided.
        bounds: (lowest, highest) by column; see `about` and `at_least`.
        groups: those that count; empty: all that were measured.
        what: what the ratio is, in words.
        best: only the highest of the ratios counts, as in "up to 4 times".
    """

    above: str
    below: str
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    groups: tuple[str, ...] = ()
    what: str = ""
    best: bool = False

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the ratio of each seed or pass with the bounds."""
        ratios = {
            (group, column): [a / b for a, b in paired]
            for group in ours.groups
            for column in ours.columns
            if (paired := pair_seeds(ours, self.above, self.below, column, group))
        }
        middle = {place: statistics.median(found) for place, found in ratios.items()}
        groups = self.groups or ours.groups
        counting = [(g, column) for g, column in ratios if g in groups and column in self.bounds]
        if self.best:
            counting = sorted(counting, key=middle.__getitem__)[-1:]
        outcomes, words, details = [], [], []
        for group, column in ratios:
            text = f"{middle[group, column]:.3g}"
            place = describe_place(group, column)
            if (group, column) not in counting:
                details.append(f"{place}: {text}, not compared")
                continue
            low, high = self.bounds[column]
            inside = [low <= ratio <= high for ratio in ratios[group, column]]
            outcomes.append(
                Outcome.AGREES
                if all(inside)
                else Outcome.NOT_SETTLED
                if any(inside)
                else Outcome.DIFFERS
            )
            bounds = describe_bounds(low, high)
            expected = "" if outcomes[-1] is Outcome.AGREES else f" (expected {bounds})"
            words.append(f"{text} at {place}{expected}")
            details.append(f"{place}: {text}, expected {bounds}: {outcomes[-1].value}")
        what = self.what or f"{self.above} over {self.below}"
        summary = f"{what}: {', '.join(words) or 'not measured where the paper has it'}"
        return Judgement(combine(outcomes), summary, tuple(details))


@dataclass(frozen=True)
class Equal:
    """Every number equals the printed one: columns "printed" and "ours", a row a label.

    `rounded` has the relative tolerances of labels whose values the paper rounds.
    """

    rounded: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare each row."""
        wrong, details = [], []
        for group, label in ours.rows:
            theirs, found = (ours.typical(label, c, group) for c in ("printed", "ours"))
            assert isinstance(theirs, int | float)
            assert isinstance(found, int | float)
            if abs(found - theirs) > self.rounded.get(label, 1e-12) * abs(theirs):
                wrong.append(label)
                details.append(f"{label}: printed {theirs:g}, ours {found:g}")
        if wrong:
            return Judgement(Outcome.DIFFERS, f"other values of {', '.join(wrong)}", tuple(details))
        if not ours.rows:
            return Judgement(Outcome.NOT_SETTLED, "nothing was counted")
        precision = " to the printed precision" if self.rounded else ""
        every = f"all {len(ours.rows)} values are" if len(ours.rows) > 1 else "the value is"
        return Judgement(Outcome.AGREES, f"{every} equal{precision}")


@dataclass(frozen=True)
class Every:
    """All of several criteria hold."""

    criteria: tuple[Criterion, ...]

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Judge by each, and join what they say."""
        found = [criterion(printed, ours) for criterion in self.criteria]
        return Judgement(
            combine([judgement.outcome for judgement in found]),
            "; ".join(judgement.summary for judgement in found),
            tuple(line for judgement in found for line in judgement.details),
        )


@dataclass(frozen=True)
class Pair:
    """Two neighbours of an order; `gap` is positive if the first is better in our numbers."""

    better: str
    worse: str
    place: str
    gap: float
    spread: float | None
    outcome: Outcome

    def __str__(self) -> str:
        words = {
            Outcome.AGREES: "as printed",
            Outcome.DIFFERS: "the other way",
            Outcome.NOT_SETTLED: "not settled",
        }
        spread = "" if self.spread is None else f", spread {self.spread:.2g}"
        return (
            f"{self.place + ': ' if self.place else ''}{self.better} before {self.worse}: "
            f"{words[self.outcome]} (gap {self.gap:+.3g}{spread})"
        )


def compare_order(
    names: Sequence[str],
    ours: Measurement,
    column: str,
    group: str | None = "",
    *,
    better: str = "",
    exact: bool = False,
    printed: Mapping[str, float] | None = None,
) -> Iterator[Pair]:
    """Compare the neighbours of an order, best first, in one column of ours.

    Args:
        names: the order; names without numbers are skipped.
        ours: our numbers.
        column: a column of ours.
        group: a group of ours; None: each model in the group that it has.
        better: "lower" or "higher"; empty: the measurement's own.
        exact: one number decides.
        printed: the paper's numbers; neighbours with equal ones are not compared.
    """
    sign = 1.0 if (better or ours.better) == "higher" else -1.0
    groups = {model: g for g, model in ours.rows} if group is None else {}

    def numbers(name: str) -> dict[int, float]:
        return ours.by_seed(name, column, groups.get(name, group or ""))

    for first, second in pairwise(name for name in names if numbers(name)):
        if printed is not None and printed[first] == printed[second]:
            continue
        a, b = numbers(first), numbers(second)
        gaps = [sign * (a[seed] - b[seed]) for seed in sorted(a.keys() & b.keys())]
        if not gaps:
            continue
        gap = statistics.fmean(gaps)
        if gap == 0 or not (exact or is_settled(gaps)):
            outcome = Outcome.NOT_SETTLED
        else:
            outcome = Outcome.AGREES if gap > 0 else Outcome.DIFFERS
        spread = max(gaps) - min(gaps) if len(gaps) > 1 else None
        yield Pair(first, second, describe_place(group or "", column), gap, spread, outcome)


def judge_pairs(pairs: Sequence[Pair]) -> Judgement:
    """Return AGREES if all pairs do, DIFFERS if any differs, else NOT_SETTLED."""
    counts = {o: sum(pair.outcome is o for pair in pairs) for o in Outcome}
    words = {
        Outcome.AGREES: "as printed",
        Outcome.DIFFERS: "the other way",
        Outcome.NOT_SETTLED: "not settled",
    }
    parts = [f"{count} {words[outcome]}" for outcome, count in counts.items() if count]
    against = [pair for pair in pairs if pair.outcome is Outcome.DIFFERS]
    shown = ", ".join(f"{pair.worse} before {pair.better}{_at(pair)}" for pair in against[:3])
    more = ", ..." if len(against) > 3 else ""
    summary = f"of {len(pairs)} neighbours {', '.join(parts) or 'none was measured'}"
    return Judgement(
        combine([pair.outcome for pair in pairs]),
        summary + (f" (ours: {shown}{more})" if against else ""),
        tuple(map(str, pairs)),
    )


def _at(pair: Pair) -> str:
    return f" at {pair.place}" if pair.place else ""


def pair_seeds(
    ours: Measurement, first: str, second: str, column: str, group: str
) -> list[tuple[float, float]]:
    """Return the numbers of two models for each seed that both have."""
    a, b = ours.by_seed(first, column, group), ours.by_seed(second, column, group)
    return [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]


def combine(outcomes: Sequence[Outcome]) -> Outcome:
    """Return DIFFERS if any does, AGREES if all do, else (or if there are none) NOT_SETTLED."""
    if Outcome.DIFFERS in outcomes:
        return Outcome.DIFFERS
    agree = bool(outcomes) and all(outcome is Outcome.AGREES for outcome in outcomes)
    return Outcome.AGREES if agree else Outcome.NOT_SETTLED


def is_settled(gaps: Sequence[float]) -> bool:
    """Tell whether the mean gap differs from zero by a two-sided paired t-test at the 5% level."""
    if len(gaps) < 2:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    critical = T_CRITICAL[min(len(gaps), len(T_CRITICAL) + 1) - 2]
    return abs(statistics.fmean(gaps)) > critical * error


def about(value: Value, within: float = 0.25) -> tuple[float, float]:
    """Return the bounds for "about X times": a quarter below to a quarter above."""
    return float(value) * (1 - within), float(value) * (1 + within)


def at_least(value: Value) -> tuple[float, float]:
    """Return the bounds for "at least X times"."""
    return float(value), math.inf


def describe_bounds(low: float, high: float) -> str:
    """Write bounds in words."""
    if math.isinf(high):
        return f"at least {low:.3g}"
    return f"{low:.3g} to {high:.3g}"


def describe_place(group: str, column: str) -> str:
    """Write a group and a column in words; a column that is a number is a length T."""
    length = f"T = {column}" if column.isdigit() else column
    return f"{group}, {length}" if group else length
