"""Tests whether an order that the paper prints holds in our numbers, beyond noise.

An order is tested pair by pair, on neighbours. A pair is settled if its gap differs significantly
from zero, by a two-sided paired t-test over the seeds at the 5% level. With three seeds the mean
gap must be 2.5 times the gaps' standard deviation, with two seeds 9 times. With one seed no pair is
settled. Numbers without noise (FLOPs, bytes, parameters) are compared with `exact=True`. A spread
is the highest minus the lowest value.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from mezzo_core.papers.finding import Status
from mezzo_core.papers.published import Table

# Student's t, two-sided 5%, for 1 to 9 degrees of freedom; the last is used for more seeds too.
T_CRITICAL = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Verdict(str, Enum):
    """Whether an order holds in our numbers."""

    HOLDS = "the order holds"
    REVERSED = "the order does not hold"
    NOT_SETTLED = "the order is not settled"


@dataclass(frozen=True)
class Pair:
    """Two neighbours of an order, the better one first; `gap` is positive if our numbers agree."""

    better: str
    worse: str
    gap: float
    spread: float
    verdict: Verdict


@dataclass(frozen=True)
class Order:
    """A printed order compared with our numbers, neighbour by neighbour."""

    pairs: tuple[Pair, ...]

    @property
    def verdict(self) -> Verdict:
        """HOLDS if all pairs hold, REVERSED if any pair is reversed, else NOT_SETTLED."""
        verdicts = {pair.verdict for pair in self.pairs}
        if Verdict.REVERSED in verdicts:
            return Verdict.REVERSED
        return Verdict.HOLDS if verdicts == {Verdict.HOLDS} else Verdict.NOT_SETTLED

    def ranking(self, ours: Mapping[str, Sequence[float]], better: str) -> str:
        """Write our order of the compared names, best first, with their means."""
        means = {
            name: statistics.fmean(ours[name])
            for pair in self.pairs
            for name in (pair.better, pair.worse)
        }
        best_first = sorted(means, key=lambda name: means[name], reverse=better == "higher")
        return ", ".join(f"{name} {means[name]:.4g}" for name in best_first)

    def sentences(self) -> tuple[str, ...]:
        """Return a sentence for each pair, with its gap and the gap's spread over the seeds."""
        words = {
            Verdict.HOLDS: "as printed",
            Verdict.REVERSED: "the other way",
            Verdict.NOT_SETTLED: "not settled",
        }
        return tuple(
            f"{pair.better} before {pair.worse}: {words[pair.verdict]} "
            f"(gap {pair.gap:+.4g}, spread {pair.spread:.2g})"
            for pair in self.pairs
        )


def compare_order(
    ordering: Sequence[str],
    ours: Mapping[str, Sequence[float]],
    better: str,
    *,
    exact: bool = False,
    printed: Mapping[str, float] | None = None,
) -> Order:
    """Compare a printed order with our numbers.

    Args:
        ordering: names, best first; names that we did not measure are skipped.
        ours: our numbers by name, one for each seed, with the seeds in the same order.
        better: "lower" or "higher".
        exact: the numbers have no noise, so one number for each name settles the order.
        printed: the paper's numbers; neighbours with equal printed numbers are not compared.

    Raises:
        ValueError: if `better` is something else, the names have different numbers of seeds, or
            fewer than two names were measured.
    """
    if better not in ("lower", "higher"):
        raise ValueError(f'better must be "lower" or "higher", got {better!r}')
    names = [name for name in ordering if name in ours]
    if len(names) < 2:
        raise ValueError(f"an order needs two measured names, got {names} of {list(ordering)}")
    if len({len(ours[name]) for name in names}) != 1:
        raise ValueError("ours must have one number a seed for every name")
    sign = 1.0 if better == "higher" else -1.0
    pairs = []
    for first, second in pairwise(names):
        if printed is not None and printed[first] == printed[second]:
            continue
        gaps = [sign * (a - b) for a, b in zip(ours[first], ours[second], strict=True)]
        pairs.append(_pair(first, second, gaps, exact))
    return Order(tuple(pairs))


def compare_column(
    table: Table, column: str, ours: Mapping[str, Sequence[float]], group: str = ""
) -> Order:
    """Compare one column of a printed table with our numbers; see `compare_order`.

    The result has no pairs if the column has no order, or we measured fewer than two of its models.
    """
    ordering = table.ordering(column, group) if column in table.columns else ()
    if len(set(ordering) & set(ours)) < 2:
        return Order(())
    printed = table.column(column, group)
    return compare_order(ordering, ours, table.direction(column), printed=printed)


def _pair(first: str, second: str, gaps: list[float], exact: bool) -> Pair:
    gap, spread = sum(gaps) / len(gaps), max(gaps) - min(gaps)
    if gap == 0 or not (exact or is_settled(gaps)):
        verdict = Verdict.NOT_SETTLED
    else:
        verdict = Verdict.HOLDS if gap > 0 else Verdict.REVERSED
    return Pair(first, second, gap, spread, verdict)


def is_settled(gaps: Sequence[float]) -> bool:
    """Tell whether the mean gap differs from zero by a two-sided paired t-test at the 5% level."""
    if len(gaps) < 2:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    critical = T_CRITICAL[min(len(gaps), len(T_CRITICAL) + 1) - 2]
    return abs(statistics.fmean(gaps)) > critical * error


def status_of(verdict: Verdict, *, same_setting: bool) -> Status:
    """Return the status for a verdict.

    It is "scaled down" at a smaller setting than the paper's, whatever the verdict, and also if the
    order is not settled.
    """
    if not same_setting or verdict is Verdict.NOT_SETTLED:
        return Status.SCALED_DOWN
    return Status.REPRODUCED if verdict is Verdict.HOLDS else Status.DIFFERS
