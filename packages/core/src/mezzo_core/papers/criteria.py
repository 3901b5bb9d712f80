"""Criteria: what a measurement must show for a claim to agree, written before it is measured.

A criterion is called with the printed table or claim and with our numbers, and returns a
`Judgement`. The criteria here are dataclasses; a paper may write its own as functions.

Noise: an order is tested pair by pair, on neighbours, over the seeds that both have. A pair is
settled if its gap differs from zero by a two-sided paired t-test at the 5% level. With three seeds
the mean gap must be 2.5 times the gaps' standard deviation, with two seeds 9 times. With one seed
no pair is settled. Counts have no noise (`exact`). What trained models reach is held to bounds by
the same test of its distance from each; a speed must be within them in every pass.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import pairwise, product

from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Table, Value

# Student's t, two-sided 5%, for 1 to 9 degrees of freedom; the last is used for more seeds too.
T_CRITICAL = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
TRAINED = ("training", "recall")
"""The kinds of measurement whose numbers differ from seed to seed."""


class Outcome(str, Enum):
    """What came out."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_SETTLED = "not settled"


AGREES, DIFFERS, NOT_SETTLED = Outcome
OF_PAIRS = {AGREES: "as printed", DIFFERS: "the other way", NOT_SETTLED: "not settled"}


@dataclass(frozen=True)
class Judgement:
    """What came out, in one clause, with a line of text for each comparison behind it."""

    outcome: Outcome
    summary: str
    details: tuple[str, ...] = ()


Criterion = Callable[[Table | Claim, Measurement], Judgement]


@dataclass(frozen=True)
class InOrder:
    """The names stand in this order, best first, in every measured column."""

    names: tuple[str, ...] = ()  # empty: the claim's ordering; names without numbers are skipped
    columns: tuple[str, ...] = ()  # those that count; empty: all
    groups: tuple[str, ...] = ()
    exact: bool = False  # the numbers have no noise

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

    Neighbours with equal printed numbers are not compared. `across_groups` compares the rows of all
    groups with each other.
    """

    across_groups: bool = False

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare each column with that of the printed table."""
        assert isinstance(printed, Table)
        if self.across_groups:
            printed = replace(printed, rows=tuple(replace(row, group="") for row in printed.rows))
            ours = replace(ours, entries=tuple(replace(e, group="") for e in ours.entries))
        pairs: list[Pair] = []
        groups = dict.fromkeys(row.group for row in printed.rows)
        for column, group in product(printed.columns, groups):
            better = printed.direction(column)
            known = column in ours.columns and group in ours.groups
            if known and better in ("lower", "higher"):
                values = printed.column(column, group)
                order = sorted(values, key=values.__getitem__, reverse=better == "higher")
                found = compare_order(order, replace(ours, better=better), column, group)
                pairs += [pair for pair in found if values[pair.better] != values[pair.worse]]
        return judge_pairs(pairs)


@dataclass(frozen=True)
class Ratio:
    """One model's number over another's lies within bounds, in the columns that are named."""

    above: str
    below: str
    bounds: Mapping[str, tuple[float, float]] = field(default_factory=dict)  # by column
    groups: tuple[str, ...] = ()  # those that count; empty: all that were measured
    what: str = ""  # what the ratio is, in words
    best: bool = False  # only the highest of the ratios counts, as in "up to 4 times"

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the ratio of each seed or pass with the bounds."""
        ratios = {
            (group, column): [a / b for a, b in paired]
            for group in ours.groups
            for column in ours.columns
            if (paired := pair_seeds(ours, self.above, self.below, column, group))
        }
        groups = self.groups or ours.groups
        counting = [(g, column) for g, column in ratios if g in groups and column in self.bounds]
        if self.best:
            counting = sorted(counting, key=lambda place: statistics.median(ratios[place]))[-1:]
        outcomes, words, details = [], [], []
        for (group, column), found in ratios.items():
            text, place = f"{statistics.median(found):.3g}", describe_place(group, column)
            if (group, column) not in counting:
                details.append(f"{place}: {text}, not compared")
                continue
            low, high = self.bounds[column]
            bounds = f"at least {low:.3g}" if math.isinf(high) else f"{low:.3g} to {high:.3g}"
            outcomes.append(compare_bounds(found, low, high, ours.kind))
            side = "more" if statistics.median(found) > high else "less"
            differs = f" ({side} than expected: {bounds})"
            words.append(f"{text} at {place}{differs if outcomes[-1] is DIFFERS else ''}")
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
        wrong = {}
        for group, label in ours.rows:
            theirs, found = (ours.typical(label, c, group) for c in ("printed", "ours"))
            assert isinstance(theirs, int | float)
            assert isinstance(found, int | float)
            # "not ... <=", because a NaN is equal to nothing
            if not abs(found - theirs) <= self.rounded.get(label, 1e-12) * abs(theirs):
                wrong[group, label] = f"{label}: printed {theirs:g}, ours {found:g}"
        if wrong:
            labels = ", ".join(label for _, label in wrong)
            return Judgement(DIFFERS, f"other values of {labels}", tuple(wrong.values()))
        if not ours.rows:
            return Judgement(NOT_SETTLED, "nothing was counted")
        every = f"all {len(ours.rows)} values are" if len(ours.rows) > 1 else "the value is"
        precision = " to the printed precision" if self.rounded else ""
        return Judgement(AGREES, f"{every} equal{precision}")


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
        place = f"{self.place}: " if self.place else ""
        spread = "" if self.spread is None else f", spread {self.spread:.2g}"
        said = f"{OF_PAIRS[self.outcome]} (gap {self.gap:+.3g}{spread})"
        return f"{place}{self.better} before {self.worse}: {said}"


def compare_order(
    names: Sequence[str], ours: Measurement, column: str, group: str = "", *, exact: bool = False
) -> Iterator[Pair]:
    """Compare the neighbours of an order, best first, in one column and group of ours.

    Args:
        names: the order; names without numbers are skipped.
        ours: our numbers.
        column: a column of ours.
        group: a group of ours.
        exact: one number decides.
    """
    sign, place = 1 if ours.better == "higher" else -1, describe_place(group, column)
    for first, second in pairwise(name for name in names if ours.by_seed(name, column, group)):
        gaps = [sign * (a - b) for a, b in pair_seeds(ours, first, second, column, group)]
        if gaps:
            gap = statistics.fmean(gaps)
            settled = gap != 0 and (exact or is_settled(gaps))
            outcome = NOT_SETTLED if not settled else AGREES if gap > 0 else DIFFERS
            spread = max(gaps) - min(gaps) if len(gaps) > 1 else None
            yield Pair(first, second, place, gap, spread, outcome)


def judge_pairs(pairs: Sequence[Pair]) -> Judgement:
    """Return AGREES if all pairs do, DIFFERS if any differs, else NOT_SETTLED."""
    outcomes = [pair.outcome for pair in pairs]
    parts = [f"{outcomes.count(o)} {words}" for o, words in OF_PAIRS.items() if o in outcomes]
    summary = f"of {len(pairs)} neighbours {', '.join(parts) or 'none was measured'}"
    against = [
        f"{pair.worse} before {pair.better}{pair.place and f' at {pair.place}'}"
        for pair in pairs
        if pair.outcome is DIFFERS
    ]
    if against:
        summary += f" (ours: {', '.join(against[:3])}{', ...' if len(against) > 3 else ''})"
    return Judgement(combine(outcomes), summary, tuple(map(str, pairs)))


def pair_seeds(
    ours: Measurement, first: str, second: str, column: str, group: str
) -> list[tuple[float, float]]:
    """Return the numbers of two models for each seed that both have."""
    a, b = ours.by_seed(first, column, group), ours.by_seed(second, column, group)
    return [(a[seed], b[seed]) for seed in sorted(a.keys() & b.keys())]


def combine(outcomes: Sequence[Outcome]) -> Outcome:
    """Return DIFFERS if any does, AGREES if all do, else (or if there are none) NOT_SETTLED."""
    if DIFFERS in outcomes:
        return DIFFERS
    return AGREES if set(outcomes) == {AGREES} else NOT_SETTLED


def is_settled(gaps: Sequence[float]) -> bool:
    """Tell whether the mean gap differs from zero by a two-sided paired t-test at the 5% level."""
    if len(gaps) < 2:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    critical = T_CRITICAL[min(len(gaps), len(T_CRITICAL) + 1) - 2]
    return abs(statistics.fmean(gaps)) > critical * error


def compare_bounds(values: Sequence[float], low: float, high: float, kind: str) -> Outcome:
    """Tell whether values are within bounds.

    Args:
        values: one for each seed or pass; without any, nothing is settled.
        low: the least value that is within.
        high: the greatest.
        kind: of the measurement. What trained models reach has noise, even with one seed.
    """
    if kind not in TRAINED:
        inside = {low <= value <= high for value in values}
        return NOT_SETTLED if len(inside) != 1 else AGREES if True in inside else DIFFERS
    distances = [[value - bound for value in values] for bound in (low, high) if bound < math.inf]
    if not all(map(is_settled, distances)):
        return NOT_SETTLED
    return AGREES if low <= statistics.fmean(values) <= high else DIFFERS


def about(value: Value) -> tuple[float, float]:
    """Return the bounds for "about X times": a quarter below to a quarter above."""
    return float(value) * 0.75, float(value) * 1.25


def at_least(value: Value) -> tuple[float, float]:
    """Return the bounds for "at least X times"."""
    return float(value), math.inf


def describe_place(group: str, column: str) -> str:
    """Write a group and a column in words; a column that is a number is a length T."""
    length = f"T = {column}" if column.isdigit() else column
    return f"{group}, {length}" if group else length
