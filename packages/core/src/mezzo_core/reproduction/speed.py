"""Describes committed speed measurements in words: one model's numbers relative to another's.

A speed depends on the machine. On another machine than the paper's the status is "scaled down".
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mezzo_core.papers import Experiment, Finding, Measurement, Status

Words = Callable[[Measurement], str | None]
"""Returns what a measurement says about a claim, or None if it says nothing."""
Place = tuple[str, str]
"""The group and the column of a cell."""


def with_words(
    finding: Finding, experiment: Experiment, said: str | None, details: tuple[str, ...] = ()
) -> Finding:
    """Update a finding by a committed speed result, if `said` is not None.

    The finding's earlier summary is kept among its details.
    """
    if said is None:
        return finding
    ours = experiment.measurement
    attempted = finding.status is not Status.NOT_ATTEMPTED
    before = (f"Also: {finding.summary}",) if attempted else ()
    return replace(
        finding,
        status=Status.SCALED_DOWN,
        summary=f"on {ours.device} {said} ({ours.setting})",
        measurements=(ours, *finding.measurements),
        details=(*details, *before, *finding.details),
    )


def ratios(ours: Measurement, above: str, below: str) -> dict[Place, float]:
    """Divide one model's mean by another's, by group and column, where both were measured."""
    found = {}
    for group in groups(ours):
        for column in ours.columns:
            samples = ours.samples(column, group)
            if above in samples and below in samples:
                found[group, column] = sum(samples[above]) / sum(samples[below])
    return found


def groups(ours: Measurement) -> list[str]:
    """Return the groups of rows, in the order of the rows."""
    return list(dict.fromkeys(row.group for row in ours.rows))


def listed(found: Mapping[Place, float], axis: str = "T") -> str:
    """Write numbers with their groups and columns, such as "1.25 at B=64, T = 4096"."""
    parts = (f"{ratio:.2f} at {named(*place, axis)}" for place, ratio in found.items())
    return ", ".join(parts) or "not measured"


def named(group: str, column: str, axis: str = "T") -> str:
    """Write a group and a column in words; a column that is a number is a value of `axis`."""
    number = column.removeprefix(f"{axis}=")
    length = f"{axis} = {number}" if number.isdigit() else column
    return f"{group}, {length}" if group else length
