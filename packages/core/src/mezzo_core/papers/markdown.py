"""Renders a report, and a package's RESULTS.md, as Markdown."""

from pathlib import Path

from mezzo_core.papers import tables
from mezzo_core.papers.claims import Finding
from mezzo_core.papers.measurement import read_results
from mezzo_core.papers.published import Claim, Published, Table
from mezzo_core.papers.report import PaperReport, Report
from mezzo_core.papers.tables import Grid

KINDS = ("speed", "training", "recall", "timings")


def to_markdown(report: Report, out: Path) -> str:
    """Render a report whose figures are below `out`."""
    lines = ["# Reproduction report", ""]
    lines += [f"`{report.command}`, scale {report.scale}, {report.seconds:.0f} seconds.", ""]
    lines += [f"- {name}: {value}" for name, value in report.origin.items() if value]
    for paper in report.papers:
        lines += ["", *_paper(paper, out)]
    return "\n".join(lines).rstrip() + "\n"


def results_markdown(folder: Path, title: str, published: Published) -> str:
    """Return the text of RESULTS.md: every result file below a `results` folder, with its figure.

    A file `notes.md` in the folder, written by hand, stands before them.

    Raises:
        UserError: if a file is no result.
    """
    lines = [f"# Results of {title}", "", f"What we measured for “{published.title}”."]
    lines += ["Generated from `results/` by `python tools/check_results.py`.", ""]
    if (notes := folder / "notes.md").exists():
        lines += [notes.read_text(encoding="utf-8")]
    results = read_results(folder).values()
    machine = ""
    for ours in sorted(results, key=lambda r: (r.machine, KINDS.index(r.kind), r.source)):
        lines += [f"## {ours.machine}", ""] if ours.machine != machine else []
        lines += [f"### {ours.title}", "", *table(tables.measured_grid(ours))]
        if (folder / f"{ours.source}.png").exists():
            lines += [f"![{ours.title}](results/{ours.source}.png)", ""]
        machine = ours.machine
    return "\n".join(lines).rstrip() + "\n"


def table(grid: Grid) -> list[str]:
    """Return the lines of a table under its caption, with an empty line at the end."""
    if not grid.rows:
        return []
    caption = [f"*{_escaped(grid.caption)}*", ""] if grid.caption else []
    rule = ["---", *["---" if grid.words else "---:"] * (len(grid.header) - 1)]
    lines = (map(_escaped, cells) for cells in (grid.header, rule, *grid.rows))
    return [*caption, *(f"| {' | '.join(cells)} |" for cells in lines), ""]


def _paper(paper: PaperReport, out: Path) -> list[str]:
    lines = [f"## {paper.published.title}", "", *table(tables.tally_grid(paper.findings))]
    lines += [*(f"- {note}" for note in paper.notes), ""]
    lines += table(tables.overview_grid(paper.findings))
    for figure in paper.figures:
        image = f"![{figure.title}]({figure.path.relative_to(out).as_posix()})"
        lines += [f"### {figure.title}", "", image, "", figure.text, ""]
    for sample in paper.samples:
        quoted = (sample.prompt + sample.text).replace("```", "'''")
        lines += [f"### {sample.title}", "", "```text", quoted, "```", ""]
    for finding in paper.findings:
        lines += _finding(finding, paper.published.by_id.get(finding.id))
    for ours in paper.results.values():
        lines += [f"### {ours.source}: {ours.title}", "", *table(tables.measured_grid(ours))]
    return lines


def _finding(finding: Finding, printed: Table | Claim | None) -> list[str]:
    lines = [f"### {finding.id}", ""]
    if printed:
        lines += [f"> {tables.statement(printed)}", "", *table(tables.published_grid(printed))]
    outcome = f"**{tables.describe_outcome(finding.outcome)}** ({finding.how.value})"
    lines += [f"{outcome}: {finding.summary}", "", *(f"- {line}" for line in finding.details), ""]
    for ours in finding.measurements:
        lines += table(tables.measured_grid(ours))
    return lines


def _escaped(text: str) -> str:
    for sign in "|*<":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")
