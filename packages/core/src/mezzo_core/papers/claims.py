"""A paper's claims: what answers each table and claim, by which criterion, or what it would need.

A package has one list of `Answer`s, `ANSWERS` in its `claims.py`, in the paper's order:

    Answer("rat.table6", result("nvidia-h200/speed_table6", AsPrinted()), measured("table6", ...)),
    Answer("rat.claim.flops", counted(flops_growth, grows_as_claimed)),
    Answer("rat.table2", otherwise="needs the 1.3B models trained on 100B tokens"),

The evidence at the setting nearest to the paper's comes first; of equally near evidence, the first
in the list. It decides what came out, and the rest is shown beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Literal

from mezzo_core.errors import FailedRunError, UserError
from mezzo_core.libraries import first_line
from mezzo_core.papers.criteria import Criterion, Outcome
from mezzo_core.papers.measurement import How, Measurement, at_best
from mezzo_core.papers.published import Claim, Published, Table

Kind = Literal["table", "claim"]


@dataclass(frozen=True)
class Run:
    """Where evidence comes from in one `reproduce` run, which trains and measures when asked."""

    results: Mapping[str, Measurement]  # the committed ones, by "MACHINE/NAME"
    trained: Callable[[Sequence[str], bool], Measurement | None]  # the models; by length?
    measured: Callable[[str], Measurement | None]  # by name; None where this scale has none


@dataclass(frozen=True)
class Evidence:
    """A way to a measurement, if this run or package has it, and what it must show."""

    find: Callable[[Run, Table | Claim], Measurement | None]
    criterion: Criterion
    note: str = ""  # said after the outcome, such as what is left out


def result(name: str, criterion: Criterion, note: str = "") -> Evidence:
    """Answer from a committed result file, "MACHINE/NAME"."""
    return Evidence(lambda run, printed: run.results.get(name), criterion, note)


def swept(name: str, column: str, criterion: Criterion, note: str = "") -> Evidence:
    """Answer from a result file whose columns are learning rates, by each model at its best one.

    Args:
        name: see `result`.
        column: the name that the criterion's only column has.
        criterion: see Evidence.
        note: see Evidence.
    """
    return Evidence(
        lambda run, printed: (ours := run.results.get(name)) and at_best(ours, column),
        criterion,
        note,
    )


def trained(
    criterion: Criterion, *models: str, by_length: bool = False, note: str = ""
) -> Evidence:
    """Answer from this run's tiny trainings: perplexity, or loss by test length.

    Args:
        criterion: see Evidence.
        models: those that are shown.
        by_length: the columns are test lengths "T=..." instead of "Val. PPL".
        note: see Evidence.
    """
    return Evidence(lambda run, printed: run.trained(models, by_length), criterion, note)


def measured(name: str, criterion: Criterion, note: str = "") -> Evidence:
    """Answer from what this run measures under a name (`Reproduction.measurers`)."""
    return Evidence(lambda run, printed: run.measured(name), criterion, note)


def counted(count: Callable[[Any], Measurement], criterion: Criterion, note: str = "") -> Evidence:
    """Answer by counting or computing, without training; `count` is given the printed entry."""
    return Evidence(lambda run, printed: count(printed), criterion, note)


class Answer:
    """What answers the table or claim of an id, and what it would need where no evidence is."""

    def __init__(self, id: str, *evidence: Evidence, otherwise: str = "") -> None:
        if not (evidence or otherwise):
            raise ValueError(f"{id}: say what answers it, or what it would need")
        self.id, self.evidence, self.otherwise = id, evidence, otherwise


@dataclass(frozen=True)
class Finding:
    """What is reported about one table or claim; `outcome` is None if not attempted."""

    id: str
    kind: Kind
    how: How
    outcome: Outcome | None
    summary: str  # one sentence
    measurements: tuple[Measurement, ...] = ()  # those that decided come first
    details: tuple[str, ...] = ()  # a line for each comparison


def find(answer: Answer, published: Published, run: Run) -> Finding:
    """Return the finding for one table or claim.

    Evidence that fails with an error settles nothing: the finding tells the error, and the other
    evidence decides.

    Raises:
        UserError: see `failure`.
    """
    printed = published.by_id[answer.id]
    kind: Kind = "table" if isinstance(printed, Table) else "claim"
    judged, failed = [], []
    for each in answer.evidence:
        try:
            ours = each.find(run, printed)
            if ours is not None:
                judged.append((each.criterion(printed, ours), ours, each.note))
        except Exception as error:
            failed.append(failure(error))
    if failed and not judged:
        summary = "; ".join(failed)
        return Finding(answer.id, kind, How.SCALED_DOWN, Outcome.NOT_SETTLED, summary)
    if not judged:
        summary = answer.otherwise or "this run has no numbers for it"
        return Finding(answer.id, kind, How.NOT_ATTEMPTED, None, summary)
    judged.sort(key=lambda each: list(How).index(each[1].how))
    (first, decisive, note), *others = judged
    beside = (
        f"beside it, {describe_source(m)}: {j.outcome.value}, {j.summary}{n}" for j, m, n in others
    )
    return Finding(
        answer.id,
        kind,
        decisive.how,
        first.outcome,
        f"{describe_source(decisive)}: {first.summary}{note}",
        tuple(measurement for _, measurement, _ in judged),
        (*first.details, *beside, *(f"beside it: {words}" for words in failed)),
    )


def failure(error: Exception) -> str:
    """Say in one line what failed.

    A training that diverges or a kernel that is wrong is no mistake of the user's.

    Raises:
        UserError: the error itself, if the user can mend it, such as a full disk.
    """
    if isinstance(error, UserError) and not isinstance(error, FailedRunError):
        raise error
    return f"failed: {type(error).__name__}: {first_line(error)}"


def describe_source(ours: Measurement) -> str:
    """Say where numbers come from: the machine of a result file, or this run."""
    if not ours.source:
        return "counted" if ours.kind == "count" else "this run"
    return f"{ours.origin['gpu'] or 'CPU'}, {ours.source}"


def check_complete(published: Published, answers: Sequence[Answer]) -> None:
    """Raise a ValueError unless the answers are the paper's tables and claims, in its order."""
    for answer, id in zip_longest((answer.id for answer in answers), published.ids):
        if answer != id:
            raise ValueError(f"claims: {answer} stands where the paper has {id}")
