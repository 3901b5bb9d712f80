"""Renders a package's RESULTS.md."""

from pathlib import Path

from mezzo_core.papers import tables
from mezzo_core.papers.measurement import read_results
from mezzo_core.papers.published import Published
from mezzo_core.papers.tables import Grid

KINDS = ("speed", "training", "recall", "timings")


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


def _escaped(text: str) -> str:
    for sign in "|*<":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")
