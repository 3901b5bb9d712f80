"""Renders a report as one HTML page that contains its figures, loads nothing and can be printed."""

import base64
import re
from collections.abc import Sequence
from html import escape
from itertools import zip_longest

from mezzo_core.papers import tables
from mezzo_core.papers.claims import Finding
from mezzo_core.papers.criteria import Outcome
from mezzo_core.papers.measurement import How
from mezzo_core.papers.published import Claim, Table
from mezzo_core.papers.report import Figure, PaperReport, Report, Sample
from mezzo_core.papers.tables import Grid

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #222; background: #fff; max-width: 76rem;
  margin: 2rem auto; padding: 0 1rem; } a { color: #1a56a8; } [hidden] { display: none !important; }
h1, h2, h3 { line-height: 1.25; } h1, h2 { margin-top: 3rem; } h3 { margin: 1.5rem 0 .5rem; }
h1, h2, section { scroll-margin-top: 5rem; } section { border-top: 1px solid #eee; }
nav ul { margin: 0; padding-left: 1.2rem; } nav > ul { columns: 24rem; } li { break-inside: avoid; }
form { position: sticky; top: 0; background: #fff; border-bottom: 1px solid #ccc; padding: .5rem 0;
  display: flex; flex-wrap: wrap; gap: 0 1rem; } img { max-width: 100%; height: auto; }
table { border-collapse: collapse; font-size: .85rem; margin: .5rem 0; }
th, td { border-bottom: 1px solid #ddd; padding: .2rem .6rem; text-align: right; }
th:first-child, td:first-child, .words td, .words th { text-align: left; vertical-align: top; }
caption, figcaption, .quiet { color: #555; text-align: left; } .numbers td { white-space: nowrap; }
.beside { display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; align-items: flex-start; }
.scroll { overflow-x: auto; max-width: 100%; } ul.lines { font-size: .85rem; columns: 28rem; }
blockquote { margin: .5rem 0; padding-left: .8rem; border-left: 3px solid #ccc; }
pre { background: #f6f6f6; padding: .8rem; white-space: pre-wrap; }
section > p > b, tr[data-outcome] > td:nth-child(2) { padding: .2rem .6rem; font-weight: normal;
  background: var(--back, #eee); color: var(--ink, #444); }
tr[data-outcome] > td:not(:last-child) { white-space: nowrap; }
[data-outcome=agrees] { --back: #d6f0d6; --ink: #10500f; }
[data-outcome=differs] { --back: #fbdcd9; --ink: #7c1208; }
[data-outcome=not-settled] { --back: #fdf0c8; --ink: #6b4e00; }
@media print { form, nav { display: none; } body { max-width: none; margin: 0; font-size: 11px; }
  figure, tr { break-inside: avoid; } .scroll { overflow: visible; } }
"""

# The address may say what to show, as in #outcome=differs,not-settled&how=scaled-down.
SCRIPT = """
const form = document.getElementById("filter"), boxes = [...form.elements];
const findings = document.querySelectorAll("[data-outcome]");
function show() {
  const off = new Set(boxes.filter(box => !box.checked).map(box => box.value));
  for (const each of findings)
    each.hidden = off.has(each.dataset.outcome) || off.has(each.dataset.how);
}
function obey() {
  const asked = new URLSearchParams(location.hash.slice(1));
  for (const box of boxes)
    if (asked.has(box.name)) box.checked = asked.get(box.name).split(",").includes(box.value);
  show();
}
form.addEventListener("input", show);
addEventListener("hashchange", obey);
form.hidden = false;
obey();
"""


def to_html(report: Report) -> str:
    """Render a report as a complete page."""
    machine = Grid(
        f"{report.command}, scale {report.scale}, {report.seconds:.0f} seconds",
        ("", "measured with"),
        tuple((name, str(value)) for name, value in report.origin.items() if value),
        words=True,
    )
    papers = [_paper(paper) for paper in report.papers]
    outcomes = [("outcome", tables.describe_outcome(outcome)) for outcome in (*Outcome, None)]
    ways = [("how", how.value) for how in How if how is not How.NOT_ATTEMPTED]
    # The checkboxes stay hidden where no script runs.
    boxes = "".join(
        f'<label><input type="checkbox" name="{name}" value="{_slug(words)}" checked="checked"/> '
        f"{escape(words)}</label>"
        for name, words in (*outcomes, *ways)
    )
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
<nav><ul>{"".join(contents for contents, _ in papers)}</ul></nav>
{_grid(machine)}
<form id="filter" hidden="hidden">Show: {boxes}</form>
{"".join(body for _, body in papers)}
<script>{SCRIPT}</script>
</body>
</html>
"""


def _paper(paper: PaperReport) -> tuple[str, str]:
    """Return a paper's table of contents, and its parts."""
    found = {"table": "", "claim": ""}
    for finding in paper.findings:
        found[finding.kind] += _finding(finding, paper.published.by_id[finding.id])
    parts = {
        "What came out": _grid(tables.tally_grid(paper.findings)) + _lines(paper.notes),
        "Every table and claim": _grid(tables.overview_grid(paper.findings), paper.findings),
        "Figures": "".join(map(_figure, paper.figures)),
        "A sample": "".join(map(_sample, paper.samples)),
        "Tables": found["table"],
        "Claims": found["claim"],
    }
    ids = {title: _slug(f"{paper.name} {title}") for title, part in parts.items() if part}
    links = "".join(f'<li><a href="#{id}">{title}</a></li>' for title, id in ids.items())
    body = "".join(f'<h2 id="{id}">{title}</h2>{parts[title]}' for title, id in ids.items())
    title, id, authors = map(escape, (paper.published.title, paper.name, paper.published.authors))
    return (
        f'<li><a href="#{id}">{title}</a><ul>{links}</ul></li>',
        f'<h1 id="{id}">{title}</h1><p class="quiet">{authors}</p>{body}',
    )


def _finding(finding: Finding, printed: Table | Claim) -> str:
    """Return what the paper says, what came out, and our numbers beside the paper's."""
    says = f"<blockquote>{escape(tables.statement(printed))}</blockquote>"
    grids = (tables.published_grid(printed), *map(tables.measured_grid, finding.measurements))
    outcome = f"<b>{tables.describe_outcome(finding.outcome)}</b> ({finding.how.value}): "
    return (
        f'<section id="{escape(finding.id)}" {_data(finding)}><h3>{escape(finding.id)}</h3>{says}'
        f"<p>{outcome}{escape(finding.summary)}</p>"
        f'{_lines(finding.details)}<div class="beside">{"".join(map(_grid, grids))}</div></section>'
    )


def _data(finding: Finding) -> str:
    outcome = _slug(tables.describe_outcome(finding.outcome))
    return f'data-outcome="{outcome}" data-how="{_slug(finding.how.value)}"'


def _slug(words: str) -> str:
    return re.sub(r"\W+", "-", words.lower().replace("'", ""))


def _lines(lines: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<ul class="lines">{items}</ul>' if items else ""


def _grid(grid: Grid, findings: Sequence[Finding] = ()) -> str:
    """Return a table; with findings, each row is one's and leads to it."""
    if not grid.rows:
        return ""
    body = ""
    for row, finding in zip_longest(grid.rows, findings):
        first, *others = map(escape, row)
        link = f'<a href="#{first}">{first}</a>' if finding else first
        mark = f" {_data(finding)}" if finding else ""
        body += f"<tr{mark}><td>{'</td><td>'.join((link, *others))}</td></tr>"
    header = "".join(f"<th>{escape(cell)}</th>" for cell in grid.header)
    return (
        f'<div class="scroll"><table class="{"words" if grid.words else "numbers"}">'
        f"<caption>{escape(grid.caption)}</caption><thead><tr>{header}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )


def _figure(figure: Figure) -> str:
    image = base64.b64encode(figure.path.read_bytes()).decode("ascii")
    return (
        f'<figure><h3>{escape(figure.title)}</h3><img alt="{escape(figure.title)}" '
        f'src="data:image/png;base64,{image}"/><figcaption>{escape(figure.text)}</figcaption></figure>'
    )


def _sample(sample: Sample) -> str:
    text = "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in sample.text)
    start = f"<h3>{escape(sample.title)}</h3><pre><b>{escape(sample.prompt)}</b>"
    return f"{start}{escape(text)}</pre>"
