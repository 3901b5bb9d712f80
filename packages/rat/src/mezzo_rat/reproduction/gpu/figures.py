"""The figures of the speed tables: our lines over the length, beside the paper's."""

from collections.abc import Sequence
from pathlib import Path

from mezzo_core.papers import Published
from mezzo_core.papers.cells import Result, SpeedTable
from mezzo_core.papers.figures import draw_lengths

Lines = dict[str, list[tuple[float, float]]]


def draw(result: Result, published: Published) -> Path:
    """Draw a result's lines over the length next to the paper's; save them next to its file."""
    path = result.path.with_suffix(".png")
    table = result.table
    device = result.to_json()["gpu"] or "this CPU"
    groups = table.groups if len(table.groups) > 1 else ("",)
    panels = {}
    for group in groups:
        label = f"{table.unit}, {group}" if group else table.unit
        panels[f"{label}, {device}"] = _lines(result, group)
        printed = _printed_lines(table, group, published)
        if printed:
            panels[f"{label}, the paper"] = printed
    draw_lengths({name: lines for name, lines in panels.items() if lines}, path)
    return path


def _lines(result: Result, group: str) -> Lines:
    """Return (length, mean) for each measured cell of each model."""
    lines: Lines = {}
    for model in result.table.models:
        for column in result.table.columns:
            cell = result.cells.get((group, model, column))
            if cell is not None and not isinstance(cell["values"], str):
                mean = sum(cell["values"]) / len(cell["values"])
                lines.setdefault(model, []).append((float(column.removeprefix("T=")), mean))
    return lines


def _printed_lines(table: SpeedTable, group: str, published: Published) -> Lines:
    """Return the paper's lines: a table's rows, or for Figure 5 points of Tables 1 and 11."""
    lines: Lines = {}
    if table.name == "fig5":
        places: Sequence[tuple[str, str, float]] = (
            ("rat.table1", "Throughput", 4096.0),
            ("rat.table11", "Throughput", 16_384.0),
        )
    else:
        id = table.ids[0]
        places = [(id, column, float(column)) for column in published.table(id).columns]
    for id, column, length in places:
        printed = published.table(id)
        if group and group not in {row.group for row in printed.rows}:
            continue
        for model, value in printed.column(column, group).items():
            lines.setdefault(model, []).append((length, value))
    return lines
