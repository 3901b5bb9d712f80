"""Writes a report as Markdown, as one HTML page and as JSON."""

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.papers.finding import Finding
from mezzo_core.papers.html import to_html
from mezzo_core.papers.markdown import to_markdown
from mezzo_core.papers.report import Report, count_statuses, relative


def prepare_folder(out: Path, paper: str) -> Path:
    """Create the report's folder without files of an older report, and return `out/paper`.

    The returned folder is for the paper's figures, runs and results. Its older figures are removed;
    other files stay.

    Raises:
        UserError: if `out` cannot be written.
    """
    folder = out / paper
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("report.md", "report.html", "report.json"):
            (out / name).unlink(missing_ok=True)
        shutil.rmtree(folder / "figures", ignore_errors=True)
        (folder / "figures").mkdir()
    except OSError as error:
        raise UserError(f"{out}: no report can be written there ({error.strerror})") from error
    return folder


def render_report(report: Report, out: Path) -> None:
    """Write report.md, report.html and report.json into `out`, where the figures already are.

    The HTML page contains its figures and loads no other files.
    """
    (out / "report.md").write_text(to_markdown(report, out), encoding="utf-8")
    (out / "report.html").write_text(to_html(report), encoding="utf-8")
    content = json.dumps(to_json(report, out), indent=1, ensure_ascii=False)
    (out / "report.json").write_text(content + "\n", encoding="utf-8")


def to_json(report: Report, out: Path) -> dict[str, Any]:
    """Return the report as JSON; figures are paths relative to `out`."""
    return {
        "scale": report.scale,
        "command": report.command,
        "seconds": round(report.seconds, 1),
        "environment": dict(report.environment),
        "papers": [
            {
                "name": paper.name,
                "title": paper.published.title,
                "statuses": {s.value: n for s, n in count_statuses(paper.findings).items()},
                "settings": list(paper.settings),
                "findings": [_finding_to_json(finding) for finding in paper.findings],
                "figures": [relative(figure, out) for figure in paper.figures],
                "samples": [dataclasses.asdict(sample) for sample in paper.samples],
                "bench": [dict(row) for row in paper.bench],
            }
            for paper in report.papers
        ],
    }


def _finding_to_json(finding: Finding) -> dict[str, Any]:
    content = dataclasses.asdict(finding)
    for entry, measurement in zip(content["measurements"], finding.measurements, strict=True):
        for line, row in zip(entry["rows"], measurement.rows, strict=True):
            line.update(values=row.values, spread=row.spread)
    return content
