"""Checks that every criterion of a paper compares something, and can come out against it."""

from collections.abc import Iterator
from dataclasses import replace

from mezzo_core.reproduction.claims import Evidence, Printed, Run
from mezzo_core.reproduction.criteria import Given, Order
from mezzo_core.reproduction.measurement import Entry, Measurement, entries, read_results
from mezzo_core.reproduction.outcomes import Outcome
from mezzo_core.reproduction.published import Table
from mezzo_core.reproduction.reproduce import Reproduction


def check_claims(paper: Reproduction) -> None:
    """Check each criterion on its count, or on the committed result with its numbers changed.

    There it must compare something, and differ when the numbers of a row or a column are many times
    higher or lower. An order as printed must agree with the printed numbers.

    Raises:
        AssertionError: names every criterion that fails this.
    """
    run = Run(read_results(paper.results_folder), lambda name: None)
    wrong = []
    for id, evidence in paper.answers.items():
        printed = paper.published.by_id[id]
        wrong += [f"{id}: {why}" for each in evidence for why in _problems(each, printed, run)]
    assert not wrong, "\n".join(wrong)


def _problems(evidence: Evidence, printed: Printed, run: Run) -> Iterator[str]:
    criterion = evidence.criterion
    if isinstance(printed, Table) and criterion == Order():
        theirs = _quiet(_printed(printed))
        if criterion(printed, theirs).outcome is not Outcome.AGREES:
            yield "the printed numbers do not agree with their own order"
    ours = evidence.find(run, printed)
    if ours is None or ours.kind == "test":  # a test can fail by itself
        return
    # `Given` settles nothing while its condition fails, so its two parts are tested apart.
    parts = (
        [criterion.condition, criterion.criterion] if isinstance(criterion, Given) else [criterion]
    )
    quiet = _quiet(ours)
    for part in parts:
        if not any(part(printed, each).outcome is Outcome.DIFFERS for each in _changed(quiet)):
            yield f"no change of {ours.source or 'the count'} contradicts {part}"


def _printed(table: Table) -> Measurement:
    rows = [row for row in table.rows if row.kind != "ratio"]
    found = (entries({row.model: row.values}, table.columns, row.group) for row in rows)
    return Measurement(sum(found, ()), table.columns, table.setting, better=table.better)


def _quiet(ours: Measurement) -> Measurement:
    """Return the numbers with three seeds that differ by a hundred-thousandth."""

    def seeds(entry: Entry) -> Iterator[Entry]:
        for seed in range(3):
            value = entry.value
            number = value if isinstance(value, str) else value * (1 + seed * 1e-5)
            yield replace(entry, value=number, seed=seed)

    first = {(e.group, e.model, e.column): e for e in reversed(ours.entries)}
    every = (each for entry in reversed(first.values()) for each in seeds(entry))
    return replace(ours, entries=tuple(every))


def _changed(ours: Measurement) -> Iterator[Measurement]:
    """Yield the measurement with the numbers and details of one row or one column changed."""
    for model in dict.fromkeys(entry.model for entry in ours.entries):
        chosen = [entry.model == model for entry in ours.entries]
        yield from (_times(ours, chosen, factor) for factor in (1e-3, 1e3))
        if ours.kind != "count":
            failed = (replace(e, value="OOM") if e.model == model else e for e in ours.entries)
            yield replace(ours, entries=tuple(failed))
    for column in ours.columns:
        chosen = [entry.column == column for entry in ours.entries]
        yield from (_times(ours, chosen, factor) for factor in (1e-3, 1e3))


def _times(ours: Measurement, chosen: list[bool], factor: float) -> Measurement:
    def times(entry: Entry) -> Entry:
        if isinstance(entry.value, str):
            return entry
        numbers = {k: v * factor for k, v in entry.details.items() if isinstance(v, float)}
        # A zero becomes a one, because no factor changes a zero.
        value = entry.value * factor if entry.value else 1.0
        return replace(entry, value=value, details={**entry.details, **numbers})

    pairs = zip(ours.entries, chosen, strict=True)
    return replace(ours, entries=tuple(times(entry) if c else entry for entry, c in pairs))
