"""A paper's claims: what answers each table and claim, and by which criterion.

A package has one `ANSWERS` in its `claims.py`, in the paper's order: evidence by id. A table or
claim without evidence says in `published.toml` what it would need.

    ANSWERS = {
        "rat.table6": timed("nvidia-h200/speed_", "table6", Order()),
        **by_tests("rat.claim", "packages/rat/tests", "complexity", "reversed_chunks"),
    }

One piece of evidence decides, and the report shows the others beside it: trainings come before
speeds, then the setting that is nearest to the paper's, then the first in the list.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mezzo_core.reproduction.criteria import Criterion
from mezzo_core.reproduction.measurement import How, Measurement
from mezzo_core.reproduction.outcomes import TRAINED, Judgement, Outcome, failure
from mezzo_core.reproduction.published import Claim, Published, Table
from mezzo_core.reproduction.result_file import FAILED

Printed = Table | Claim
TRAININGS, PERPLEXITY = "trainings", "Val. PPL"
"""The name of the tiny trainings among what a run measures, and their column of perplexities."""
View = Callable[[Measurement], Measurement | None]
"""Looks at a measurement in another way, such as at some of its columns."""


@dataclass(frozen=True)
class Run:
    """Where evidence comes from in one `reproduce` run, which trains and measures when asked."""

    results: Mapping[str, Measurement]  # the committed ones, by "MACHINE/NAME"
    measured: Callable[[str], Measurement | None]  # by name; None where this scale has none


@dataclass(frozen=True)
class Evidence:
    """Where to find a measurement, and what it must show.

    A measured `part` of a table or claim may differ, but cannot agree alone.
    """

    find: Callable[[Run, Printed], Measurement | None]  # None if run and package have none
    criterion: Criterion
    note: str = ""  # said after the outcome
    part: str = ""  # what was measured, if it is not all
    changed: str = ""  # how the criterion was, after its result was known; the outcome before

    def judge(self, printed: Printed, ours: Measurement) -> Judgement:
        """Judge by the criterion, and add what is to be known about it."""
        judged = self.criterion(printed, ours)
        outcome, said = judged.outcome, [judged.summary]
        if self.part:
            said.append(f"this is {self.part} alone")
            outcome = Outcome.NOT_SETTLED if outcome is Outcome.AGREES else outcome
        said += [self.note] if self.note else []
        said += [f"criterion changed: {self.changed}"] if self.changed else []
        return replace(judged, outcome=outcome, summary="; ".join(said))


def viewed(
    get: Callable[[Run], Measurement | None],
    criterion: Criterion,
    view: View | None = None,
    **said: str,
) -> Evidence:
    """Answer from a measurement of a run, looked at by `view`.

    `said` are `note`, `part` and `changed`, see Evidence.
    """

    def find(run: Run, printed: Printed) -> Measurement | None:
        ours = get(run)
        return view(ours) if ours and view else ours

    return Evidence(find, criterion, **said)


def result(name: str, criterion: Criterion, view: View | None = None, **said: str) -> Evidence:
    """Answer from a committed result file, "MACHINE/NAME"; see `viewed`."""
    return viewed(lambda run: run.results.get(name), criterion, view, **said)


def measured(name: str, criterion: Criterion, view: View | None = None, **said: str) -> Evidence:
    """Answer from what this run measures under a name (`Reproduction.speeds`); see `viewed`."""
    return viewed(lambda run: run.measured(name), criterion, view, **said)


def timed(
    prefix: str, name: str, criterion: Criterion, view: View | None = None, **said: str
) -> list[Evidence]:
    """Answer from a speed of this run, and from the committed file `prefix` + `name`.

    Measured at the paper's sizes, this run's decides. Smaller ones are only shown beside it.
    """
    committed = result(f"{prefix}{name}", criterion, view, **said)
    return [measured(name, criterion, view, **said), committed]


def trained(criterion: Criterion, *models: str, by_length: bool = False, **said: str) -> Evidence:
    """Answer from this run's tiny trainings of some models.

    They have the column PERPLEXITY, or with `by_length` a loss for each test length "T=...".
    """

    def view(ours: Measurement) -> Measurement:
        columns = tuple(c for c in ours.columns if (c != PERPLEXITY) == by_length)
        kept = (e for e in ours.entries if e.column in columns and e.model in (models or [e.model]))
        return replace(ours, entries=tuple(kept), columns=columns)

    return measured(TRAININGS, criterion, view, **said)


def counted(count: Callable[[Any], Measurement], criterion: Criterion, **said: str) -> Evidence:
    """Answer by counting or computing, without training; `count` is given the printed entry."""
    return Evidence(lambda run, printed: count(printed), criterion, **said)


def by_test(test: str, **said: str) -> Evidence:
    """Answer by a test, "FILE::NAME", which CI runs; see `viewed`.

    Use it for claims that need no measurement: about the code, or what can be counted in it.
    """

    def holds(printed: Printed, ours: Measurement) -> Judgement:
        return Judgement(Outcome.AGREES, f"shown by the test {test}")

    ours = Measurement((), (), test, How.PAPER, kind="test")
    return Evidence(lambda run, printed: ours, holds, **said)


def by_tests(
    prefix: str, folder: str, file: str, *names: str, test: str = "", **said: str
) -> dict[str, list[Evidence]]:
    """Answer each claim PREFIX.NAME by test_NAME of FOLDER/test_FILE.py, or all by one `test`."""
    tests = f"{folder}/test_{file}.py::test"
    return {f"{prefix}.{name}": [by_test(f"{tests}_{test or name}", **said)] for name in names}


@dataclass(frozen=True)
class Finding:
    """What is reported about one table or claim; `outcome` is None if not attempted."""

    id: str
    how: How
    outcome: Outcome | None
    summary: str  # one sentence
    measurements: tuple[Measurement, ...] = ()  # those that decided come first
    details: tuple[str, ...] = ()  # a line for each comparison
    better: bool = False  # it differs, and ours is better than the paper says
    here: tuple[str, ...] = ()  # what this run's own numbers say


def find(printed: Printed, evidence: Sequence[Evidence], run: Run) -> Finding:
    """Return the finding for one table or claim.

    Evidence that fails with an error settles nothing: the finding tells the error, and the other
    evidence decides.

    Raises:
        UserError: see `failure`.
    """
    judged, failed = list[tuple[Judgement, Measurement]](), list[str]()
    for each in evidence:
        try:
            if ours := each.find(run, printed):
                errors = {e.details["error"] for e in ours.entries if e.value == FAILED}
                failed += errors
                judged += [] if errors else [(each.judge(printed, ours), ours)]
        except Exception as error:
            failed.append(failure(error))
    if failed and not judged:
        return Finding(printed.id, How.SCALED_DOWN, Outcome.NOT_SETTLED, "; ".join(failed))
    if not judged:
        summary = printed.needs or "this run has no numbers for it"
        return Finding(printed.id, How.NOT_ATTEMPTED, None, summary)
    judged.sort(key=lambda each: (each[1].kind not in TRAINED, list(How).index(each[1].how)))
    (first, decisive), *others = judged
    beside = (
        f"beside it, {_source(m)}{j.outcome.value}, {j.summary}"
        for j, m in others
        if not m.is_of_this_run
    )
    return Finding(
        printed.id,
        decisive.how,
        first.outcome,
        f"{_source(decisive)}{first.summary}",
        tuple(measurement for _, measurement in judged if measurement.entries),
        (*first.details, *beside, *(f"beside it: {words}" for words in failed)),
        first.outcome is Outcome.DIFFERS and first.better,
        tuple(f"{j.outcome.value}: {j.summary}" for j, m in judged if m.is_of_this_run),
    )


def _source(ours: Measurement) -> str:
    """Say where numbers come from: a result file, or this run."""
    if ours.is_of_this_run:
        return "this run: "
    return f"{ours.source}: " if ours.source else "counted: " if ours.kind == "count" else ""


def check_complete(published: Published, answers: Mapping[str, Sequence[Evidence]]) -> None:
    """Raise a ValueError unless each table and claim is answered or says what it needs.

    The answers must stand in the paper's order.
    """
    order = [id for id in published.by_id if id in answers]
    if order != list(answers):
        raise ValueError(f"answers that the paper has not, or not in this order: {list(answers)}")
    for id, printed in published.by_id.items():
        if not (answers.get(id) or printed.needs):
            raise ValueError(f"{id}: nothing answers it, nor says what it needs")
