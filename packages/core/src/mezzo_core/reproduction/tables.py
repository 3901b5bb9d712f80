"""Tables as grids of text, for the report and RESULTS.md."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo_core.reproduction.claims import Finding
from mezzo_core.reproduction.measurement import Entry, How, Measurement
from mezzo_core.reproduction.outcomes import TRAINED, Outcome
from mezzo_core.reproduction.published import Claim, Table, Value

FURTHER = ("PPL before", "weights (M)", "tokens/s", "peak GB", "host ms")
"""Further columns: the highest value of a detail in each row."""


@dataclass(frozen=True)
class Grid:
    """A caption, one header and rows of cells, as many as in the header."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def render(name: str, filters: Mapping[str, Callable[..., str]], **values: Any) -> str:
    """Render a template of this folder; of HTML, texts are escaped."""
    from jinja2 import Environment, StrictUndefined

    pages = Environment(
        autoescape=".html" in name, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters |= filters
    template = Path(__file__).with_name(name).read_text(encoding="utf-8")
    return pages.from_string(template).render(tables=sys.modules[__name__], **values)


def tally_grid(findings: Sequence[Finding]) -> Grid:
    """Return how many tables and claims were run in which way (rows), and what came out."""
    counts = Counter((finding.how, finding.outcome) for finding in findings)
    outcomes = [o for o in (*Outcome, None) if any(outcome is o for _, outcome in counts)]
    rows = (
        (how.value, *(str(counts[how, o] or "") for o in outcomes))
        for how in How
        if any(found is how for found, _ in counts)
    )
    header = ("", *map(describe_outcome, outcomes))
    return Grid("Tables and claims, by how they were run and what came out", header, tuple(rows))


def describe_outcome(outcome: Outcome | None) -> str:
    """Return what came out in words, "not attempted" if nothing did."""
    return outcome.value if outcome else "not attempted"


def statement(printed: Table | Claim) -> str:
    """Return what the paper says: a claim's text, or a table's title."""
    return printed.text if isinstance(printed, Claim) else printed.title


def place(printed: Table | Claim) -> str:
    """Return where the paper makes a claim, or the setting of a table."""
    return printed.where if isinstance(printed, Claim) else f"Setting: {printed.setting}"


def published_grid(printed: Table | Claim) -> Grid:
    """Return the grid of a printed table, or of a claim's numbers, as they were printed."""
    if isinstance(printed, Claim):
        pairs = printed.labelled().items() if printed.labels else ()
        rows = tuple((label, _printed(value)) for label, value in pairs)
        return Grid("The paper", ("", printed.unit or "printed"), rows)
    arrows = {"lower": " ↓", "higher": " ↑"}
    header = (f"{name}{arrows.get(printed.direction(name), '')}" for name in printed.columns)
    hardware = f"; {printed.hardware}" if printed.hardware else ""
    return Grid(
        f"The paper: {printed.title}. {printed.metric} ({printed.unit}){hardware}",
        ("", *header),
        tuple((row.name, *map(_printed, row.values)) for row in printed.rows),
    )


def measured_grid(ours: Measurement) -> Grid:
    """Return the grid of our numbers: the mean over seeds, or the median over passes."""
    if ours.kind == "timings":
        return _timings_grid(ours)
    found: dict[tuple[str, str], list[dict[str, float]]] = {row: [] for row in ours.rows}
    for entry in ours.entries:
        found[entry.group, entry.model].append(_further(entry))
    titles = [t for t in FURTHER if any(t in each for row in found.values() for each in row)]
    rows = []
    for (group, model), details in found.items():
        highest = (max((d[t] for d in details if t in d), default=None) for t in titles)
        cells = [_cell(ours, model, column, group) for column in ours.columns]
        name = f"{model} ({group})" if group else model
        rows.append((name, *cells, *map(format_value, highest)))
    return Grid(_caption(ours, rows, titles), ("", *ours.columns, *titles), tuple(rows))


def _further(entry: Entry) -> dict[str, float]:
    """Return the details of an entry that have columns of their own."""
    details = entry.details
    first = [loss for step, loss in details.get("steps", {}).get("val", ()) if step == 0]
    values = (
        math.exp(first[0]) if first else None,
        details["parameters"] / 1e6 if "parameters" in details else None,
        *map(details.get, ("tokens_per_second", "peak_gb", "host_ms")),
    )
    return {title: v for title, v in zip(FURTHER, values, strict=True) if v is not None}


def _timings_grid(ours: Measurement) -> Grid:
    """Return the grid of single timings, a row for each: their shapes are too many for columns."""
    titles = ("", "shape", "ms", "20% to 80%", "host ms", "peak GB", "commit")
    rows = []
    for entry in ours.entries:
        low, high, *others = map(
            entry.details.get, ("ms_p20", "ms_p80", "host_ms", "peak_gb", "commit")
        )
        spread = f"{format_value(low)} to {format_value(high)}"
        cells = (entry.value, spread, *others)
        rows.append((entry.model, entry.column, *map(format_value, cells)))
    return Grid(_caption(ours, rows), titles, tuple(rows))


def _caption(ours: Measurement, rows: Sequence[Sequence[str]], further: Sequence[str] = ()) -> str:
    """Say what was measured and on what, and explain the words in the cells."""
    words = {cell for row in rows for cell in row}
    notes = (
        f"Ours{f' ({ours.unit})' if ours.unit else ''}: {ours.setting}",
        "OOM: out of memory" if "OOM" in words else "",
        "a dash: not measured" if "-" in words else "",
        f"{', '.join(further)}: the row's highest" if further else "",
    )
    return ". ".join(filter(None, ("; ".join(filter(None, notes)), ", ".join(_origin(ours)))))


def _origin(ours: Measurement) -> Iterator[str]:
    if origin := ours.origin:
        yield origin["gpu"] or f"CPU ({origin['cpu']})"
        names = ("torch", "triton", "driver", "commit")
        yield from (f"{name} {origin[name]}" for name in names if origin.get(name))
        commits = {e.details["commit"] for e in ours.entries if e.details.get("commit")}
        if older := sorted(commits - {origin["commit"]}):
            yield f"parts at {', '.join(older)}"
        yield origin["date"]
    if ours.kind == "speed":
        yield f"passes: {len(ours.seeds)}"
    elif ours.kind in TRAINED:
        yield f"seeds: {', '.join(map(str, ours.seeds))}"
    if ours.source:
        yield f"{ours.source}.json"


def _cell(ours: Measurement, model: str, column: str, group: str) -> str:
    text = format_value(ours.typical(model, column, group))
    spread = ours.spread(model, column, group)
    if spread is None or ours.kind == "speed":
        return text
    return f"{text} ({len(ours.by_seed(model, column, group))} seeds, spread {spread:.2g})"


def _printed(value: Value) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_value(value: Value | None) -> str:
    """Write one of our numbers with four digits and separated thousands; None as a dash."""
    if value is None or isinstance(value, str):
        return value or "-"
    if isinstance(value, int):
        return f"{value:,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.2g}" if 0 < abs(value) < 1e-3 else f"{value:.4g}"
