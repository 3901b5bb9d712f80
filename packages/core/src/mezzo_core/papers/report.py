"""The content of a report: findings, figures, samples and benchmarks of each paper."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo_core.papers.finding import Finding, Status
from mezzo_core.papers.published import Published


@dataclass(frozen=True)
class Figure:
    """A PNG file of the report; `text` describes in words what it shows."""

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
    """The report of one package about its paper."""

    name: str
    published: Published
    findings: Sequence[Finding]
    figures: Sequence[Figure] = ()
    samples: Sequence[Sample] = ()
    bench: Sequence[Mapping[str, Any]] = ()
    settings: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The report of one `reproduce` run, with its command, duration and environment."""

    papers: Sequence[PaperReport]
    scale: str
    command: str
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)


def count_statuses(findings: Sequence[Finding]) -> dict[Status, int]:
    """Return the number of findings of each status, including zeros."""
    return {status: sum(f.status is status for f in findings) for status in Status}


def relative(figure: Figure, out: Path) -> str:
    """Return a figure's path relative to the report's folder."""
    return figure.path.relative_to(out).as_posix()
