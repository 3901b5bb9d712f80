"""Tables as grids of text, which both the Markdown and the HTML report are made from."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mezzo_core.papers.finding import Measurement, ResultRow
from mezzo_core.papers.published import Table, Value


@dataclass(frozen=True)
class Grid:
    """A caption, one header and rows of cells; all rows have the header's length."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def published_grid(table: Table) -> Grid:
    """Return the grid of a printed table, with numbers as they were printed."""
    arrows = {"lower": " ↓", "higher": " ↑"}
    header = tuple(f"{name}{arrows.get(table.direction(name), '')}" for name in table.columns)
    hardware = f"; {table.hardware}" if table.hardware else ""
    return Grid(
        f"The paper: {table.title}. {table.metric} ({table.unit}){hardware}",
        ("", *header),
        tuple((row.name, *(_printed(value) for value in row.values)) for row in table.rows),
    )


def measured_grid(measurement: Measurement) -> Grid:
    """Return the grid of our numbers, each with its spread over the seeds if there are several."""
    origin = [
        measurement.device,
        f"torch {measurement.torch}" if measurement.torch else "",
        f"triton {measurement.triton}" if measurement.triton else "",
        f"commit {measurement.commit}" if measurement.commit else "",
        measurement.date,
        f"seeds {', '.join(map(str, measurement.seeds))}" if measurement.seeds else "",
    ]
    unit = f" ({measurement.unit})" if measurement.unit else ""
    return Grid(
        f"Ours{unit}: {measurement.setting}. {', '.join(part for part in origin if part)}",
        ("", *measurement.columns),
        tuple(_measured_row(row) for row in measurement.rows),
    )


def bench_grid(rows: Sequence[Mapping[str, Any]]) -> Grid:
    """Return the grid of bench rows: name, shape, median, 20th and 80th percentile."""
    return Grid(
        "Speeds measured on GPUs, with the paper's and other implementations beside ours",
        ("benchmark", "implementation", "shape", "ms", "p20 to p80", "GPU", "torch", "commit"),
        tuple(
            (
                str(row["name"]),
                str(row["impl"]),
                " ".join(f"{letter}{size}" for letter, size in row["shape"].items()),
                f"{row['ms']:.4g}",
                f"{row['ms_p20']:.4g} to {row['ms_p80']:.4g}",
                str(row["gpu"]),
                str(row.get("torch", "")),
                str(row.get("commit", "")),
            )
            for row in rows
        ),
    )


def _measured_row(row: ResultRow) -> tuple[str, ...]:
    name = f"{row.model} ({row.group})" if row.group else row.model
    cells = (
        format_value(value) + ("" if spread is None else f" (spread {spread:.2g})")
        for value, spread in zip(row.values, row.spread, strict=True)
    )
    return (name, *cells)


def _printed(value: Value) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


def format_value(value: float | int | str) -> str:
    """Write one of our numbers with four significant digits and separated thousands."""
    if isinstance(value, str):
        return value
    if isinstance(value, int) or (value == int(value) and abs(value) >= 100):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value != 0 and abs(value) < 1e-3:
        return f"{value:.2g}"
    return f"{value:.4g}"
