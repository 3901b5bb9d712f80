"""The content of a report, and the way to its files: report.md, report.html and report.json."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.papers.claims import Finding
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.measurement import How, Measurement
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
    """The report of one package about its paper; `results` are its committed result files."""

    name: str
    published: Published
    findings: Sequence[Finding]
    figures: Sequence[Figure] = ()
    samples: Sequence[Sample] = ()
    results: Mapping[str, Measurement] = field(default_factory=dict)
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
    """Count the findings about tables and claims by how they were run and what came out."""
    found = [(f.how, f.outcome) for f in findings if f.kind != "check"]
    order = [(how, outcome) for how in How for outcome in (*Outcome, None)]
    return {each: found.count(each) for each in order if each in found}


def prepare_folder(out: Path, paper: str) -> Path:
    """Create `out/paper` for a paper's figures, runs and speeds, and return it.

    Older reports in `out`, and older figures and speeds, are removed; other files stay.

    Raises:
        UserError: if `out` cannot be written.
    """
    folder = out / paper
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in ("md", "html", "json"):
            (out / f"report.{suffix}").unlink(missing_ok=True)
        for name in ("figures", "speed"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "figures").mkdir()
    except OSError as error:
        raise UserError(f"{out}: no report can be written there ({error.strerror})") from error
    return folder


def write_report(report: Report, out: Path) -> None:
    """Write report.md, report.html and report.json into `out`, where the figures already are."""
    from mezzo_core.papers.html import to_html
    from mezzo_core.papers.markdown import to_markdown

    content = json.dumps(_to_json(report), indent=1, ensure_ascii=False) + "\n"
    texts = {"md": to_markdown(report, out), "html": to_html(report), "json": content}
    for suffix, text in texts.items():
        (out / f"report.{suffix}").write_text(text, encoding="utf-8")


def _to_json(report: Report) -> dict[str, Any]:
    """Return the report as JSON, without the curves of trainings, which each claim would repeat."""
    papers: list[dict[str, Any]] = [
        {
            "name": paper.name,
            "title": paper.published.title,
            "notes": paper.notes,
            "findings": [asdict(finding) for finding in paper.findings],
            "samples": [asdict(sample) for sample in paper.samples],
        }
        for paper in report.papers
    ]
    for finding in (finding for paper in papers for finding in paper["findings"]):
        for entry in (e for ours in finding["measurements"] for e in ours["entries"]):
            entry["details"].pop("steps", None)
    content = {name: value for name, value in vars(report).items() if name != "papers"}
    return {**content, "seconds": round(report.seconds, 1), "papers": papers}
