"""What a report holds: findings, figures, samples and benchmarks of each paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo_core.papers.finding import Finding, Status
from mezzo_core.papers.published import Published


@dataclass(frozen=True)
class Figure:
    """A PNG that was drawn for the report; `text` says in words what it shows."""

    path: Path
    title: str
    text: str


@dataclass(frozen=True)
class Sample:
    """A text that a trained model wrote after `prompt`."""

    title: str
    prompt: str
    text: str


@dataclass(frozen=True)
class PaperReport:
    """What one package reports of its paper."""

    name: str
    published: Published
    findings: Sequence[Finding]
    figures: Sequence[Figure] = ()
    samples: Sequence[Sample] = ()
    bench: Sequence[Mapping[str, Any]] = ()
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """All that one run reports, with what it was made with."""

    papers: Sequence[PaperReport]
    scale: str
    command: str
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


def count_statuses(findings: Sequence[Finding]) -> dict[Status, int]:
    """Return how many findings have each status, every status named."""
    return {status: sum(f.status is status for f in findings) for status in Status}


def relative(figure: Figure, out: Path) -> str:
    """Return a figure's path as the report's folder sees it."""
    return figure.path.relative_to(out).as_posix()
