"""Renders a report as one HTML page that contains its figures, loads nothing and can be printed."""

import base64
from collections.abc import Sequence
from html import escape

from mezzo_core.papers.finding import Finding, Status
from mezzo_core.papers.grid import Grid, bench_grid, measured_grid, published_grid
from mezzo_core.papers.published import Claim, Table
from mezzo_core.papers.report import Figure, PaperReport, Report, Sample, count_statuses

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff;
  max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.25; } h2 { margin-top: 3rem; } h3 { margin-top: 2rem; }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0; }
caption { text-align: left; color: #555; padding-bottom: .25rem; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right;
  font-variant-numeric: tabular-nums; }
th:first-child, td:first-child, .words td, .words th { text-align: left; vertical-align: top; }
.beside { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; align-items: flex-start; }
.scroll { overflow-x: auto; max-width: 100%; }
section { border-top: 1px solid #eee; } figure { margin: 1.5rem 0; }
img { max-width: 100%; height: auto; } figcaption, .quiet { color: #555; }
blockquote { margin: .5rem 0; padding-left: .8rem; border-left: 3px solid #ccc; }
pre { background: #f6f6f6; padding: .8rem; white-space: pre-wrap; }
.status { border-radius: .3rem; padding: .05rem .45rem; font-size: .8rem; white-space: nowrap; }
.reproduced { background: #d6f0d6; color: #10500f; }
.differs { background: #fbdcd9; color: #7c1208; }
.scaled-down { background: #dbe8fb; color: #123a75; }
.not-attempted { background: #eee; color: #444; }
"""


def to_html(report: Report) -> str:
    """Render a report as a complete page."""
    machine = "".join(
        f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>"
        for name, value in report.environment.items()
    )
    body = "\n".join(_paper(paper) for paper in report.papers)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>Reproduction report</title>
<style>{STYLE}</style>
</head>
<body>
<h1>Reproduction report</h1>
<p><code>{escape(report.command)}</code>, scale {escape(report.scale)},
{report.seconds:.0f} seconds.</p>
<table class="words"><caption>Measured with</caption>{machine}</table>
{body}
</body>
</html>
"""


def _paper(paper: PaperReport) -> str:
    findings = {finding.id: finding for finding in paper.findings}
    counts = count_statuses([f for f in paper.findings if f.kind != "check"])
    tally = " ".join(f"{_badge(status)} {number}" for status, number in counts.items())
    parts = [
        f"<h2>{escape(paper.published.title)}</h2>",
        f'<p class="quiet">{escape(paper.published.authors)}</p>',
        f"<p>Tables and claims: {tally}</p>",
        _bullets(paper.settings),
        *(_figure(figure) for figure in paper.figures),
        *(_sample(sample) for sample in paper.samples),
        "<h2>Every table, claim and check</h2>",
        _overview(paper),
        "<h2>Tables</h2>",
        *(_table(t, findings[t.id]) for t in paper.published.tables if t.id in findings),
        "<h2>Claims</h2>",
        *(_claim(c, findings[c.id]) for c in paper.published.claims if c.id in findings),
        "<h2>Checks of the method</h2>",
        *(_check(finding) for finding in paper.findings if finding.kind == "check"),
    ]
    if paper.bench:
        parts += ["<h2>Benchmarks</h2>", _grid(bench_grid(paper.bench))]
    return "\n".join(parts)


def _overview(paper: PaperReport) -> str:
    rows = "".join(
        f'<tr><td><a href="#{escape(f.id)}">{escape(f.id)}</a></td>'
        f"<td>{_badge(f.status)}</td><td>{escape(f.summary)}</td></tr>"
        for f in paper.findings
    )
    return f'<div class="scroll"><table class="words">{rows}</table></div>'


def _table(table: Table, finding: Finding) -> str:
    return (
        _opening(finding, f"{table.id}: {table.title}")
        + _bullets(finding.details)
        + f'<div class="beside">{_grid(published_grid(table))}{_ours(finding)}</div>'
        + f'<p class="quiet">The paper\'s setting: {escape(table.setting)}</p></section>'
    )


def _claim(claim: Claim, finding: Finding) -> str:
    printed = ""
    if claim.labels:
        pairs = ", ".join(f"{label} {value}" for label, value in claim.labelled().items())
        printed = f'<p class="quiet">Printed: {escape(pairs)}</p>'
    return (
        _opening(finding, claim.id)
        + f"<blockquote>{escape(claim.text)} ({escape(claim.where)})</blockquote>{printed}"
        + f"{_bullets(finding.details)}{_ours(finding)}</section>"
    )


def _check(finding: Finding) -> str:
    return f"{_opening(finding, finding.id)}{_bullets(finding.details)}{_ours(finding)}</section>"


def _opening(finding: Finding, title: str) -> str:
    return (
        f'<section id="{escape(finding.id)}"><h3>{escape(title)}</h3>'
        f"<p>{_badge(finding.status)} {escape(finding.summary)}</p>"
    )


def _ours(finding: Finding) -> str:
    return "".join(_grid(measured_grid(measurement)) for measurement in finding.measurements)


def _badge(status: Status) -> str:
    return f'<span class="status {status.value.replace(" ", "-")}">{status.value}</span>'


def _bullets(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f"<ul>{items}</ul>" if items else ""


def _grid(grid: Grid) -> str:
    header = "".join(f"<th>{escape(cell)}</th>" for cell in grid.header)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in grid.rows
    )
    return (
        f'<div class="scroll"><table><caption>{escape(grid.caption)}</caption>'
        f"<thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _figure(figure: Figure) -> str:
    image = base64.b64encode(figure.path.read_bytes()).decode("ascii")
    return (
        f"<figure><h3>{escape(figure.title)}</h3>"
        f'<img alt="{escape(figure.text)}" src="data:image/png;base64,{image}"/>'
        f"<figcaption>{escape(figure.text)}</figcaption></figure>"
    )


def _sample(sample: Sample) -> str:
    return (
        f"<h3>{escape(sample.title)}</h3>"
        f"<pre><b>{escape(sample.prompt)}</b>{escape(_printable(sample.text))}</pre>"
    )


def _printable(text: str) -> str:
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )
