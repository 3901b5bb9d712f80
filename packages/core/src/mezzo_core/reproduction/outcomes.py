"""The outcomes of a comparison, and when they are clear of the noise of seeds and passes.

Noise: an order is tested pair by pair, on neighbours, over the seeds that both have. A pair is
settled if its gap differs from zero by a two-sided paired t-test at the 5% level. With three seeds
the mean gap must be 2.5 times the gaps' standard deviation, with two seeds 9 times. With one seed
no pair is settled. Counts have no noise (`exact`). A number of a trained model is held to bounds by
the same test of its distance from each bound; a speed must lie within them in every pass.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from mezzo_core.errors import FailedRunError, UserError
from mezzo_core.libraries import first_line

# Student's t, two-sided 5%, for 1 to 9 degrees of freedom; the last is used for more seeds too.
T_CRITICAL = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
TRAINED = ("training", "recall")
"""The kinds of measurement whose numbers differ from seed to seed."""
Bounds = tuple[float, float]
"""The least and the greatest value that are allowed."""


class Outcome(str, Enum):
    """What came out."""

    AGREES = "agrees"
    DIFFERS = "differs"
    NOT_SETTLED = "not settled"


AGREES, DIFFERS, NOT_SETTLED = Outcome


@dataclass(frozen=True)
class Judgement:
    """What came out, in one clause, with a line of text for each comparison behind it."""

    outcome: Outcome
    summary: str
    details: tuple[str, ...] = ()
    better: bool = False
    """Whether ours is better than the paper says, wherever it differs."""


def combine(outcomes: Sequence[Outcome]) -> Outcome:
    """Return DIFFERS if any does, AGREES if all do, else (or if there are none) NOT_SETTLED."""
    if DIFFERS in outcomes:
        return DIFFERS
    return AGREES if set(outcomes) == {AGREES} else NOT_SETTLED


def is_settled(gaps: Sequence[float]) -> bool:
    """Tell whether the mean gap differs from zero by a two-sided paired t-test at the 5% level."""
    if len(gaps) < 2:
        return False
    if math.isinf(gaps[0]):  # one of the two diverged with every seed
        return True
    error = statistics.stdev(gaps) / math.sqrt(len(gaps))
    critical = T_CRITICAL[min(len(gaps), len(T_CRITICAL) + 1) - 2]
    return abs(statistics.fmean(gaps)) > critical * error


def compare_bounds(values: Sequence[float], low: float, high: float, kind: str) -> Outcome:
    """Tell whether the values of all seeds or passes are within bounds.

    Without values, or with one seed of a training, nothing is settled.
    """
    if kind not in TRAINED:
        inside = {low <= value <= high for value in values}
        return NOT_SETTLED if len(inside) != 1 else AGREES if True in inside else DIFFERS
    distances = [[value - bound for value in values] for bound in (low, high) if bound < math.inf]
    if not all(map(is_settled, distances)):
        return NOT_SETTLED
    return AGREES if low <= statistics.fmean(values) <= high else DIFFERS


def failure(error: Exception) -> str:
    """Say in one line what failed.

    A training that diverges or a kernel that is wrong is no mistake of the user's.

    Raises:
        UserError: the error itself, if the user can mend it, such as a full disk.
    """
    if isinstance(error, UserError) and not isinstance(error, FailedRunError):
        raise error
    return f"failed: {type(error).__name__}: {first_line(error)}"
