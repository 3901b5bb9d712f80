"""The content of a report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo_core.papers.claims import Finding
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.measurement import How
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
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Report:
    """The report of one `reproduce` run, with its command, duration and machine."""

    papers: Sequence[PaperReport]
    scale: str
    command: str
    seconds: float
    origin: Mapping[str, Any] = field(default_factory=dict)


def tally(findings: Sequence[Finding]) -> dict[tuple[How, Outcome | None], int]:
    """Count the findings by how they were run and what came out."""
    found = [(f.how, f.outcome) for f in findings]
    order = [(how, outcome) for how in How for outcome in (*Outcome, None)]
    return {each: found.count(each) for each in order if each in found}
