"""The files of a report: report.html and report.json."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.papers.html import to_html
from mezzo_core.papers.report import Report


def prepare_folder(out: Path, paper: str) -> Path:
    """Create `out/paper` for a paper's figures, runs and speeds, and return it.

    Older reports in `out`, and older figures and speeds, are removed; other files stay.

    Raises:
        UserError: if `out` cannot be written.
    """
    folder = out / paper
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for suffix in ("html", "json"):
            (out / f"report.{suffix}").unlink(missing_ok=True)
        for name in ("figures", "speed"):
            shutil.rmtree(folder / name, ignore_errors=True)
        (folder / "figures").mkdir()
    except OSError as error:
        raise UserError(f"{out}: no report can be written there ({error.strerror})") from error
    return folder


def write_report(report: Report, out: Path) -> None:
    """Write report.html and report.json into `out`, where the figures already are."""
    content = json.dumps(_finite(_to_json(report)), indent=1, ensure_ascii=False) + "\n"
    (out / "report.html").write_text(to_html(report), encoding="utf-8")
    (out / "report.json").write_text(content, encoding="utf-8")


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


def _finite(value: Any) -> Any:
    """Return JSON without NaN and infinity, which it has not: null in their place."""
    if isinstance(value, Mapping):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
