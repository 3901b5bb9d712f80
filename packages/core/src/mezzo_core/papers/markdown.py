"""Renders a report as Markdown, readable in a terminal and on a code-hosting site."""

from pathlib import Path

from mezzo_core.papers.finding import Finding
from mezzo_core.papers.grid import Grid, bench_grid, measured_grid, published_grid
from mezzo_core.papers.report import PaperReport, Report, count_statuses, relative


def to_markdown(report: Report, out: Path) -> str:
    """Render a report whose figures are below `out`."""
    lines = ["# Reproduction report", ""]
    lines += [f"`{report.command}`, scale {report.scale}, {report.seconds:.0f} seconds.", ""]
    lines += [f"- {name}: {value}" for name, value in report.environment.items()]
    for paper in report.papers:
        lines += ["", *_paper(paper, out)]
    return "\n".join(lines) + "\n"


def _paper(paper: PaperReport, out: Path) -> list[str]:
    findings = {finding.id: finding for finding in paper.findings}
    counts = count_statuses([f for f in paper.findings if f.kind != "check"])
    lines = [f"## {paper.published.title}", ""]
    lines += [
        "Tables and claims: "
        + ", ".join(f"{number} {status.value}" for status, number in counts.items())
        + ".",
        "",
    ]
    lines += [f"- {setting}" for setting in paper.settings]
    lines += ["", *_overview(paper), ""]
    for figure in paper.figures:
        lines += [f"### {figure.title}", "", f"![{figure.text}]({relative(figure, out)})", ""]
        lines += [figure.text, ""]
    for sample in paper.samples:
        quoted = (sample.prompt + sample.text).replace("```", "'''")
        lines += [f"### {sample.title}", "", "```text", quoted, "```", ""]
    for table in paper.published.tables:
        if table.id in findings:
            lines += [f"### {table.id}: {table.title}", "", *_finding(findings[table.id])]
            lines += _grid(published_grid(table))
            lines += [f"Setting: {table.setting}", ""]
    for claim in paper.published.claims:
        if claim.id in findings:
            lines += [f"### {claim.id}", "", f"> {claim.text} ({claim.where})", ""]
            if claim.values and claim.labels:
                values = ", ".join(f"{label} {value}" for label, value in claim.labelled().items())
                lines += [f"Printed: {values}", ""]
            lines += _finding(findings[claim.id])
    for finding in paper.findings:
        if finding.kind == "check":
            lines += [f"### {finding.id}", "", *_finding(finding)]
    if paper.bench:
        lines += ["### Benchmarks", "", *_grid(bench_grid(paper.bench))]
    return lines


def _overview(paper: PaperReport) -> list[str]:
    rows = tuple((f.id, f.status.value, f.summary) for f in paper.findings)
    return _grid(Grid("", ("table, claim or check", "status", "in one sentence"), rows))


def _finding(finding: Finding) -> list[str]:
    lines = [f"**{finding.status.value}**: {finding.summary}", ""]
    lines += [f"- {detail}" for detail in finding.details]
    lines += [""] if finding.details else []
    for measurement in finding.measurements:
        lines += _grid(measured_grid(measurement))
    return lines


def _grid(grid: Grid) -> list[str]:
    caption = [f"*{grid.caption}*", ""] if grid.caption else []
    return [
        *caption,
        _line(grid.header),
        _line(("---",) * len(grid.header)),
        *(_line(row) for row in grid.rows),
        "",
    ]


def _line(cells: tuple[str, ...]) -> str:
    escaped = (cell.replace("|", "\\|").replace("\n", " ") for cell in cells)
    return "| " + " | ".join(escaped) + " |"
