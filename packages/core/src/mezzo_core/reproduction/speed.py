"""Speeds measured elsewhere, in words: what one model's numbers are to another's.

A speed belongs to the machine: on another one than the paper's it is always scaled down.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from mezzo_core.papers import Experiment, Finding, Measurement, Status

Words = Callable[[Measurement], str | None]
"""What a measurement says about one claim; None: nothing."""
Place = tuple[str, str]
"""The group and the column of a cell."""


def with_words(
    finding: Finding, experiment: Experiment, said: str | None, details: tuple[str, ...] = ()
) -> Finding:
    """Let a committed result of speed answer, if it says anything.

    What the finding said before stays beside it.
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
    """Write numbers with their places, such as "1.25 at B=64, T = 4096"."""
    parts = (f"{ratio:.2f} at {named(*place, axis)}" for place, ratio in found.items())
    return ", ".join(parts) or "not measured"


def named(group: str, column: str, axis: str = "T") -> str:
    """Write a place in words; a column that is a number is a length, by default T."""
    number = column.removeprefix(f"{axis}=")
    length = f"{axis} = {number}" if number.isdigit() else column
    return f"{group}, {length}" if group else length
