"""Renders a package's RESULTS.md, and the tables in READMEs."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from mezzo_core.reproduction import tables
from mezzo_core.reproduction.claims import Finding
from mezzo_core.reproduction.measurement import Measurement, read_results
from mezzo_core.reproduction.published import Published

NUMBER = re.compile(r"[\d.,]+<!-- (\S+: .*?) -->")
KINDS = ("speed", "training", "recall", "timings")


def results_markdown(
    folder: Path,
    title: str,
    published: Published | None = None,
    findings: Sequence[Finding] = (),
) -> str:
    """Return the text of a package's RESULTS.md: each table and claim, and results with figures.

    The findings are about all tables and claims of the paper, if the package has one, by the
    committed results in the folder, whose `notes.md` may have a line "MACHINE/NAME: note" for each.

    Raises:
        UserError: if a file is no result.
        ValueError: if a note is of no result.
    """
    results, notes = read_results(folder), read_notes(folder)
    if unknown := notes.keys() - results.keys():
        raise ValueError(f"{folder / 'notes.md'}: notes of no result: {', '.join(unknown)}")
    page = tables.render(
        "results.md.j2",
        {"cell": _escaped},
        title=title,
        published=published,
        findings=findings,
        tally=tables.tally_grid(findings),
        results=sorted(results.values(), key=lambda r: (r.machine, KINDS.index(r.kind), r.source)),
        notes=notes,
        figures=[name for name in results if (folder / f"{name}.png").exists()],
    )
    return page.rstrip() + "\n"


def read_notes(folder: Path) -> dict[str, str]:
    """Return the notes of a results folder, by result."""
    path = folder / "notes.md"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    pairs = (line.partition(": ") for line in lines if line)
    return {name: note for name, _, note in pairs}


def _escaped(text: str) -> str:
    for sign in "|*<":
        text = text.replace(sign, f"\\{sign}")
    return text.replace("\n", " ")


def write_numbers(text: str, sources: Mapping[str, Measurement]) -> str:
    """Return Markdown whose numbers before a comment `<!-- REFERENCE -->` are what it says."""

    def write(match: re.Match[str]) -> str:
        number = float(f"{evaluate(match[1], sources):.3g}")
        return f"{tables.format_value(number)}<!-- {match[1]} -->"

    return NUMBER.sub(write, text)


def evaluate(reference: str, sources: Mapping[str, Measurement]) -> float:
    """Return the number that a reference names.

    It is `SOURCE: [DETAIL of] MODEL [/ MODEL] [at COLUMN[, GROUP]]`. Two models mean their ratio; a
    detail, such as peak_gb, is the highest of the cells.

    Raises:
        ValueError: if there is no such number.
    """
    source, _, rest = reference.partition(": ")
    if source not in sources:
        raise ValueError(f"{reference}: nothing is named {source}")
    ours = sources[source]
    names, _, place = rest.rpartition(" at ") if " at " in rest else (rest, "", "")
    detail, of, models = names.partition(" of ")
    if not (of and detail.isidentifier()):
        detail, models = "", names
    cells = [(g, c) for g in ours.groups for c in ours.columns]
    if place:
        cells = [(g, c) for g, c in cells if place in (c, f"{c}, {g}")]
    numbers = []
    for model in models.split(" / "):
        found = [ours.typical(model, c, g) for g, c in cells]
        if detail:
            entries = (entry for g, c in cells for entry in ours.cell(model, c, g))
            found = [max(e.details[detail] for e in entries if detail in e.details)]
        known = [value for value in found if isinstance(value, int | float)]
        if len(known) != 1:
            raise ValueError(f"{reference}: {len(known)} numbers of {model}")
        numbers.append(known[0])
    return numbers[0] / math.prod(numbers[1:])
