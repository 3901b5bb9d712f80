"""Does an order that the paper prints hold in our numbers, and is it more than noise?

One seed settles nothing. A pair is settled when a paired t-test over the seeds, two-sided at 5%,
tells its gap from zero: with three seeds the mean gap must be 2.5 times the gaps' standard
deviation, with two 9 times. Numbers without noise (FLOPs, bytes, parameters) are compared with
`exact=True`. Spreads are given as the highest minus the lowest.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

from mezzo_core.papers.finding import Status
from mezzo_core.papers.published import Table

# Student's t, two-sided 5%, for 1 to 9 degrees of freedom; more seeds are held to the last.
T_CRITICAL = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


class Verdict(str, Enum):
    """Whether an order holds in our numbers."""

    HOLDS = "the order holds"
    REVERSED = "the order does not hold"
    NOT_SETTLED = "the order is not settled"


@dataclass(frozen=True)
class Pair:
    """Two neighbours of an order, best first; `gap` is positive when ours agree."""

    better: str
    worse: str
    gap: float
    spread: float
    verdict: Verdict


@dataclass(frozen=True)
class Order:
    """An order compared with ours, neighbour by neighbour."""

    pairs: tuple[Pair, ...]

    @property
    def verdict(self) -> Verdict:
        """HOLDS if each pair does, REVERSED if one is settled the other way, else NOT_SETTLED."""
        verdicts = {pair.verdict for pair in self.pairs}
        if Verdict.REVERSED in verdicts:
            return Verdict.REVERSED
        return Verdict.HOLDS if verdicts == {Verdict.HOLDS} else Verdict.NOT_SETTLED

    def ranking(self, ours: Mapping[str, Sequence[float]], better: str) -> str:
        """Write our own order of the names that were compared, best first, with their means."""
        means = {
            name: statistics.fmean(ours[name])
            for pair in self.pairs
            for name in (pair.better, pair.worse)
        }
        best_first = sorted(means, key=lambda name: means[name], reverse=better == "higher")
        return ", ".join(f"{name} {means[name]:.4g}" for name in best_first)

    def sentences(self) -> tuple[str, ...]:
        """Return one sentence a pair, with the gap and its spread over seeds."""
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
        ordering: names, best first; names that we did not measure are passed over.
        ours: by name, one number a seed, the seeds in one order for all names.
        better: "lower" or "higher".
        exact: the numbers carry no noise, so that a single one settles the order.
        printed: the paper's own numbers; neighbours for which they are equal are not compared.

    Raises:
        ValueError: if `better` is neither, seeds differ in number, or fewer than two are measured.
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

    The order is empty where the table has none, or we measured fewer than two of its models.
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
    """Tell whether a paired t-test, two-sided at 5%, tells the mean of these gaps from zero."""
    if len(gaps) < 2:
        return False
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    critical = T_CRITICAL[min(len(gaps), len(T_CRITICAL) + 1) - 2]
    return abs(statistics.fmean(gaps)) > critical * error


def status_of(verdict: Verdict, *, same_setting: bool) -> Status:
    """Return the status that a verdict gives at the paper's own setting, or at a smaller one.

    A smaller setting is "scaled down" whatever came out; so is an order that the seeds at hand
    leave open.
    """
    if not same_setting or verdict is Verdict.NOT_SETTLED:
        return Status.SCALED_DOWN
    return Status.REPRODUCED if verdict is Verdict.HOLDS else Status.DIFFERS
