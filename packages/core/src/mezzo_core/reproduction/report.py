"""A report: its content, and the files report.html and report.json."""

import base64
import io
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.reproduction import tables
from mezzo_core.reproduction.claims import Finding
from mezzo_core.reproduction.measurement import How
from mezzo_core.reproduction.published import Claim, Published, Table


@dataclass(frozen=True)
class Figure:
    """A PNG file of the report; `text` describes in words what it shows."""

    path: Path
    title: str
    text: str

    @property
    def address(self) -> str:
        """The picture as a data URL, so that the page loads nothing.

        A chart has few colours: with 32 of them it takes a fifth of the bytes.
        """
        from PIL import Image

        packed = io.BytesIO()
        with Image.open(self.path) as picture:
            few = picture.convert("RGB").quantize(32).convert("RGB")
        few.save(packed, "WEBP", lossless=True)
        return f"data:image/webp;base64,{base64.b64encode(packed.getvalue()).decode()}"


@dataclass(frozen=True)
class PaperReport:
    """The report of one package about its paper."""

    name: str
    published: Published
    findings: Sequence[Finding]
    figures: Sequence[Figure] = ()  # of what this run trained and measured
    notes: Sequence[str] = ()  # on the trainings of this run
    lead: Figure | None = None  # of a committed result; its title is the id of a claim

    def of(self, kind: type[Table | Claim]) -> list[tuple[Finding, Table | Claim]]:
        """Return the findings about tables, or those about claims, with what is printed."""
        both = ((finding, self.published.by_id[finding.id]) for finding in self.findings)
        return [(finding, printed) for finding, printed in both if isinstance(printed, kind)]


VERDICTS = {
    "agrees": "our numbers meet a criterion that was written before they were measured.",
    "better": "our numbers are better than the paper says, where they contradict it.",
    "differs": "our numbers contradict the paper, if only at a small scale: each finding says how "
    "it was run.",
    "not settled": "the seeds do not tell, or only a part was measured.",
    "not attempted": "the finding says what it would need.",
}
"""What can be said of a table or a claim, and what it means."""


def verdict(finding: Finding) -> str:
    """Return the verdict on a finding, one of `VERDICTS`."""
    return "better" if finding.better else tables.describe_outcome(finding.outcome)


@dataclass(frozen=True)
class Report:
    """The report of one `reproduce` run, with its command, duration and machine."""

    papers: Sequence[PaperReport]
    scale: str
    command: str
    seconds: float
    origin: Mapping[str, Any] = field(default_factory=dict)


def prepare_folder(out: Path, paper: str) -> Path:
    """Create `out/paper` for what a paper's run measures and draws, and return it.

    Older reports in `out`, and older results and figures, are removed; other files stay.

    Raises:
        UserError: if `out` cannot be written.
    """
    folder = out / paper
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in ("html", "json"):
            (out / f"report.{suffix}").unlink(missing_ok=True)
        for old in (*folder.glob("figures/*.png"), *folder.glob("measured/*.json")):
            old.unlink()
        (folder / "figures").mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"{out}: no report can be written there ({error.strerror})") from error
    return folder


def write_report(report: Report, out: Path) -> None:
    """Write report.html into `out`, where the figures already are, and its findings as JSON."""
    papers = [
        {
            "name": paper.name,
            "title": paper.published.title,
            "notes": paper.notes,
            "findings": [
                {k: v for k, v in vars(each).items() if k != "measurements"}
                for each in paper.findings
            ],
        }
        for paper in report.papers
    ]
    content = {**vars(report), "seconds": round(report.seconds, 1), "papers": papers}
    text = json.dumps(content, indent=1, ensure_ascii=False) + "\n"
    (out / "report.json").write_text(text, encoding="utf-8")
    (out / "report.html").write_text(to_html(report), encoding="utf-8")


def to_html(report: Report) -> str:
    """Render a report as one page that contains its figures, loads nothing and can be printed."""
    return tables.render(
        "report.html.j2",
        {"slug": _slug, "verdict": verdict},
        report=report,
        kinds={"Tables": Table, "Claims": Claim},
        verdicts=VERDICTS,
        tallies=[Counter(map(verdict, paper.findings)) for paper in report.papers],
        ways=[how.value for how in How if how is not How.NOT_ATTEMPTED],
    )


def _slug(words: str) -> str:
    return re.sub(r"\W+", "-", words.lower().replace("'", ""))
