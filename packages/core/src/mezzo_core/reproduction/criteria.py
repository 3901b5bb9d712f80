"""Criteria: what a measurement must show for a claim to agree, written before it is measured.

| Criterion | Holds if |
|---|---|
| `Order` | models stand in an order, best first |
| `Bound`, `ratio` | a number, or a ratio or difference of two, lies within bounds |
| `Within` | our values are the printed ones, to a tolerance |
| `Every`, `Given` | all of several criteria hold; one holds, and counts only where another holds |

A criterion is called with the printed table or claim and with our numbers, and returns a
`Judgement`. A paper may write its own as functions.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, product

from mezzo_core.reproduction.measurement import Measurement
from mezzo_core.reproduction.outcomes import (
    AGREES,
    DIFFERS,
    NOT_SETTLED,
    TRAINED,
    Bounds,
    Judgement,
    Outcome,
    combine,
    compare_bounds,
    is_settled,
)
from mezzo_core.reproduction.published import Claim, Table, Value
from mezzo_core.reproduction.result_file import DIVERGED

SHOWN = 4
"""How many comparisons a sentence names."""
OF_PAIRS = {AGREES: "as printed", DIFFERS: "the other way", NOT_SETTLED: "not settled"}
Criterion = Callable[[Table | Claim, Measurement], Judgement]


@dataclass(frozen=True)
class Of:
    """What is compared: a model's number, or that number over or minus another's, seed by seed."""

    model: str
    column: str = ""  # empty: each column that the criterion goes through
    over: "Of | None" = None
    minus: "Of | None" = None
    detail: str = ""  # of an entry, read instead of its value, such as "peak_gb"

    def numbers(self, ours: Measurement, column: str = "", group: str = "") -> dict[int, float]:
        """Return the numbers by seed; empty if one of the cells has none."""
        found = ours.by_seed(self.model, self.column or column, group, self.detail)
        if other := self.over or self.minus:
            second = other.numbers(ours, column, group)
            both = sorted(found.keys() & second.keys())
            found = {s: found[s] / second[s] if self.over else found[s] - second[s] for s in both}
        return found

    def ranks(self, ours: Measurement, column: str, group: str, worst: float) -> dict[int, float]:
        """Return the numbers by seed; a model that diverged with every seed has the worst."""
        cell = ours.cell(self.model, self.column or column, group)
        if {entry.value for entry in cell} == {DIVERGED} and self == Of(self.model, self.column):
            return {entry.seed: worst for entry in cell}
        return self.numbers(ours, column, group)

    def __str__(self) -> str:
        name = " ".join(filter(None, (self.detail and f"{self.detail} of", self.model)))
        if self.over and self.over.model == self.model:
            return f"{name}, {describe_place(self.column)} over {describe_place(self.over.column)}"
        at = f" at {describe_place(self.column)}" if self.column else ""
        over = f" over {self.over}" if self.over else ""
        return f"{name}{at}{over}{f' minus {self.minus}' if self.minus else ''}"


def named(model: str | Of) -> Of:
    """Return a model's name as an `Of`."""
    return Of(model) if isinstance(model, str) else model


@dataclass(frozen=True)
class Order:
    """The models stand in this order, best first, in every measured column.

    Models that diverged with every seed come last. Without models the order is the printed one: a
    claim's ordering, or that of each column of a table that we measured too, where neighbours with
    equal printed numbers are not compared.
    """

    models: tuple[str | Of, ...] = ()  # those without numbers are skipped
    columns: tuple[str, ...] = ()  # those that count; empty: all
    groups: tuple[str, ...] = ()
    exact: bool = False  # the numbers have no noise
    better: str = ""  # "lower" or "higher"; empty: as the measurement or the printed table says
    own: str = ""  # prefix of the paper's own models: if these come out ahead, ours is better

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare the neighbours of the order in each column."""
        if isinstance(printed, Table) and not self.models:
            return judge_pairs([*self._as_printed(printed, ours)], self.own)
        models = self.models or (printed.ordering if isinstance(printed, Claim) else ())
        terms = [named(model) for model in models]
        placed = all(term.column for term in terms)
        columns = [""] if placed else self.columns or ours.columns
        better = self.better or ours.better
        return judge_pairs(
            [
                pair
                for group, column in product(self.groups or ours.groups, columns)
                for pair in compare_order(terms, ours, column, group, better, exact=self.exact)
            ],
            self.own,
        )

    def _as_printed(self, printed: Table, ours: Measurement) -> Iterator["Pair"]:
        groups = dict.fromkeys(row.group for row in printed.rows)
        for column, group in product(printed.columns, groups):
            better = printed.direction(column)
            known = column in ours.columns and group in ours.groups
            if known and better in ("lower", "higher"):
                values = printed.column(column, group)
                order = sorted(values, key=values.__getitem__, reverse=better == "higher")
                found = compare_order([*map(Of, order)], ours, column, group, better)
                yield from (p for p in found if values[p.better] != values[p.worse])


@dataclass(frozen=True)
class Bound:
    """A number lies within bounds, in each column and group that count.

    A word, such as OOM or diverged, lies in no bounds. A single model must have been measured in
    every column; of two, the columns that both have count.
    """

    of: Of
    bounds: Mapping[str, Bounds] | Bounds  # by column; one for all columns
    groups: tuple[str, ...] = ()  # those that count; empty: all that were measured
    what: str = ""  # what the number is, in words
    best: bool = False  # only the highest of the numbers counts, as in "up to 4 times"
    good: str = ""  # "lower" or "higher": beyond that bound ours is better than the paper says

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Hold the number of each seed or pass to its bounds."""
        cells = {
            (group, column): (bounds, list(self.of.numbers(ours, column, group).values()))
            for group in self.groups or ours.groups or ("",)
            for column, bounds in self._by_column(ours).items()
        }
        failed = {place: word for place in cells if (word := self._failed(ours, *place))}
        if self.of.over or self.of.minus:
            cells = {place: cell for place, cell in cells.items() if cell[1]}
        if self.best:
            highest = sorted(cells, key=lambda place: statistics.median(cells[place][1]))[-1:]
            cells = {place: cells[place] for place in highest}
        outcomes, said, better = list[Outcome](), list[str](), list[bool]()
        for (group, column), ((low, high), found) in cells.items():
            number = f"{ours.middle(found):.4g}" if found else "not measured"
            outcome = compare_bounds(found, low, high, ours.kind)
            if (group, column) in failed:
                number, several = failed[group, column]
                outcome = DIFFERS if several or ours.kind not in TRAINED else NOT_SETTLED
            outcomes.append(outcome)
            if outcome is DIFFERS:
                middle = ours.middle(found) if found else math.nan
                better.append(middle > high if self.good == "higher" else middle < low)
            place = describe_place(column, group)
            expected = "" if outcome is AGREES else f" ({_describe(low, high)} expected)"
            said.append(f"{number}{place and f' at {place}'}{expected}")
        words = most_telling(said, outcomes, ", ") or "not measured"
        details = (f"{each}: {o.value}" for each, o in zip(said, outcomes, strict=True))
        summary = f"{self.what or self.of}: {words}"
        favoured = bool(self.good and better) and all(better)
        return Judgement(combine(outcomes), summary, tuple(details), favoured)

    def _by_column(self, ours: Measurement) -> Mapping[str, Bounds]:
        if isinstance(self.bounds, Mapping):
            return self.bounds
        return dict.fromkeys(("",) if self.of.column else ours.columns, self.bounds)

    def _failed(self, ours: Measurement, group: str, column: str) -> tuple[str, bool] | None:
        """Return the word in the place of a single model's number, and whether more seeds ran."""
        if self.of.over or self.of.minus:
            return None
        values = [e.value for e in ours.cell(self.of.model, self.of.column or column, group)]
        words = [value for value in values if isinstance(value, str)]
        return (words[0], len(values) > 1) if words else None


def ratio(
    above: str | Of,
    below: str | Of,
    bounds: Mapping[str, Bounds] | Bounds,
    groups: tuple[str, ...] = (),
    what: str = "",
    *,
    best: bool = False,
    good: str = "",
) -> Bound:
    """Return the criterion that one number over another lies within bounds, see `Bound`."""
    above, below = named(above), named(below)
    of = Of(above.model, above.column, over=below, detail=above.detail)
    return Bound(of, bounds, groups, what, best, good)


def change(model: str, first: str, last: str, bounds: Bounds) -> Bound:
    """Return the criterion that a model's number in the last column over the first is in bounds."""
    return ratio(Of(model, last), Of(model, first), bounds)


def grows(above: str, below: str, columns: Sequence[str]) -> Order:
    """Return the criterion that the ratio of two models grows from column to column."""
    ratios = (Of(above, column, over=Of(below, column)) for column in reversed(columns))
    return Order(tuple(ratios), better="higher")


def best(first: str | Of, *others: str | Of, columns: tuple[str, ...] = ()) -> "Every":
    """Return the criterion that one is better than each of the others in every column."""
    return Every(*(Order((first, other), columns) for other in others))


@dataclass(frozen=True)
class Within:
    """Every value of ours is the printed one: columns "printed" and "ours", a row a label.

    The tolerance is relative, by label for those whose values the paper rounds.
    """

    tolerance: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Compare each row."""
        wrong = []
        for group, label in ours.rows:
            theirs, found = (ours.by_seed(label, c, group)[0] for c in ("printed", "ours"))
            # "not ... <=", because a NaN is equal to nothing
            if not abs(found - theirs) <= self.tolerance.get(label, 1e-12) * abs(theirs):
                wrong.append(f"{label}: printed {theirs:g}, ours {found:g}")
        if wrong:
            return Judgement(DIFFERS, "; ".join(wrong[:SHOWN]), tuple(wrong))
        if not ours.rows:
            return Judgement(NOT_SETTLED, "nothing was counted")
        count = len(ours.rows)
        which = f"all {count} values are" if count > 1 else "the value is"
        rounded = " to the printed precision" if self.tolerance else ""
        return Judgement(AGREES, f"{which} equal{rounded}: {ours.setting}")


class Every:
    """All of several criteria hold."""

    def __init__(self, *criteria: Criterion) -> None:
        self.criteria = criteria

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Judge by each, and join what they say."""
        found = [criterion(printed, ours) for criterion in self.criteria]
        outcomes = [judgement.outcome for judgement in found]
        words = most_telling([judgement.summary for judgement in found], outcomes, "; ")
        details = tuple(line for judgement in found for line in judgement.details)
        differ = [judgement.better for judgement in found if judgement.outcome is DIFFERS]
        return Judgement(combine(outcomes), words, details, bool(differ) and all(differ))


@dataclass(frozen=True)
class Given:
    """A criterion that counts only where a condition holds; elsewhere nothing is settled.

    For example, a loss that is the same at each length is no merit of models that ignore it.
    """

    condition: Criterion
    criterion: Criterion
    otherwise: str  # what is the case where the condition does not hold

    def __call__(self, printed: Table | Claim, ours: Measurement) -> Judgement:
        """Judge by the criterion, if the condition holds."""
        holds, judged = self.condition(printed, ours), self.criterion(printed, ours)
        if holds.outcome is AGREES:
            return judged
        summary = f"{self.otherwise} ({holds.summary}); {judged.summary}"
        return Judgement(NOT_SETTLED, summary, (*holds.details, *judged.details))


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
        why = f"gap {self.gap:+.3g}{spread}"
        if math.isinf(self.gap):
            why = f"{self.worse if self.gap > 0 else self.better} diverged"
        return f"{place}{self.better} before {self.worse}: {OF_PAIRS[self.outcome]} ({why})"


def compare_order(
    terms: Sequence[Of],
    ours: Measurement,
    column: str,
    group: str,
    better: str,
    *,
    exact: bool = False,
) -> Iterator[Pair]:
    """Compare the neighbours of an order, best first, in one column and group.

    Terms without numbers and pairs that diverged are skipped. With `exact`, one seed is enough.
    """
    sign = 1 if better == "higher" else -1
    worst = -sign * math.inf
    found = [(term, n) for term in terms if (n := term.ranks(ours, column, group, worst))]
    for (first, a), (second, b) in pairwise(found):
        gaps = [sign * (a[seed] - b[seed]) for seed in sorted(a.keys() & b.keys())]
        if gaps and not math.isnan(gaps[0]):
            gap = statistics.fmean(gaps)
            settled = gap != 0 and (exact or is_settled(gaps))
            outcome = NOT_SETTLED if not settled else AGREES if gap > 0 else DIFFERS
            spread = max(gaps) - min(gaps) if len(gaps) > 1 else None
            place = describe_place(column, group)
            yield Pair(str(first), str(second), place, gap, spread, outcome)


def judge_pairs(pairs: Sequence[Pair], own: str = "") -> Judgement:
    """Return AGREES if all pairs do, DIFFERS if any differs, else NOT_SETTLED.

    Ours is better if every pair that differs has a model of `own`, a prefix, ahead of another.
    """
    outcomes = [pair.outcome for pair in pairs]
    ahead = [(p.worse, p.better) for p in pairs if p.outcome is DIFFERS]
    better = bool(own and ahead) and all(
        first.startswith(own) and not second.startswith(own) for first, second in ahead
    )
    if len(pairs) < 3:
        summary = "; ".join(map(str, pairs)) or "no two of the models have numbers"
        return Judgement(combine(outcomes), summary, tuple(map(str, pairs)), better)
    parts = [f"{outcomes.count(o)} {words}" for o, words in OF_PAIRS.items() if o in outcomes]
    summary = f"of {len(pairs)} neighbours {', '.join(parts)}"
    against = [
        f"{pair.worse} before {pair.better}{pair.place and f' at {pair.place}'}"
        for pair in pairs
        if pair.outcome is DIFFERS
    ]
    if against:
        more = ", ..." if len(against) > SHOWN else ""
        summary += f" (ours: {', '.join(against[:SHOWN])}{more})"
    return Judgement(combine(outcomes), summary, tuple(map(str, pairs)), better)


def about(value: Value) -> Bounds:
    """Return the bounds for "about X times": a quarter below to a quarter above."""
    return float(value) * 0.75, float(value) * 1.25


def at_least(value: Value) -> Bounds:
    """Return the bounds for "at least X times"."""
    return float(value), math.inf


def most_telling(said: Sequence[str], outcomes: Sequence[Outcome], between: str) -> str:
    """Join a few of many comparisons: first what differs, then what is not settled."""
    if len(said) <= SHOWN:
        return between.join(said)
    telling = [DIFFERS, NOT_SETTLED, AGREES]
    order = sorted(range(len(said)), key=lambda i: telling.index(outcomes[i]))
    kept = between.join(said[i] for i in order[:SHOWN])
    return f"{kept}{between}and {len(said) - SHOWN} more"


def describe_place(column: str, group: str = "") -> str:
    """Write a column and a group in words; a column that is a number is a length T."""
    length = f"T = {column}" if column.isdigit() else column
    return ", ".join(filter(None, (group, length)))


def _describe(low: float, high: float) -> str:
    return f"at least {low:.3g}" if math.isinf(high) else f"{low:.3g} to {high:.3g}"
