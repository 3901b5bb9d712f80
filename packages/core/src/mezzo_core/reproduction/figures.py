"""Draws measurements as PNG files: lines over lengths, losses over steps, a dot for each seed.

A model has the same colour and marker in every figure of its paper: they follow from its place
among the names that the caller gives.
"""

import colorsys
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mezzo_core.reproduction.criteria import describe_place
from mezzo_core.reproduction.measurement import Entry, Measurement
from mezzo_core.reproduction.published import Published
from mezzo_core.reproduction.result_file import best_of

MARKERS = "osD^vPX*<>pd"
WIDE = 10
"""From this ratio of the highest number to the lowest on, the axis is logarithmic."""
Looks = dict[str, dict[str, Any]]


def model_names(published: Published, results: Iterable[Measurement]) -> list[str]:
    """Return the models of a paper's tables, then those of our results, each once."""
    rows = [row.model for table in published.tables for row in table.rows if row.kind != "ratio"]
    ours = [entry.model for r in results if r.kind != "timings" for entry in r.entries]
    return list(dict.fromkeys((*rows, *ours)))


def draw_result(
    ours: Measurement,
    path: Path,
    models: Sequence[str] = (),
    metadata: Mapping[str, str] | None = None,
) -> Any:
    """Draw a measurement into a PNG file, which keeps the metadata, and return the figure.

    Numbered columns become lines; all else are losses by step and a dot for each seed. The order of
    the paper's models gives the colours.
    """
    from matplotlib import color_sequences
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    names = (*models, *(entry.model for entry in ours.entries))
    looks: Looks = {}
    for i, name in enumerate(dict.fromkeys(names)):
        # The models after the first ten go around the circle of hues, in a darker tone.
        dark = colorsys.hsv_to_rgb((0.6 + (i - 10) * 0.618) % 1, 1, 0.5)
        color = color_sequences["tab10"][i] if i < 10 else dark
        looks[name] = {"color": color, "marker": MARKERS[i % len(MARKERS)]}
    lines = ours.kind != "training" and len(ours.columns) > 1 and all(map(_number, ours.columns))
    figure = _draw_lines(ours, looks) if lines else _draw_dots(ours, looks)
    for axes in figure.axes:
        if not axes.has_data():
            axes.remove()
    FigureCanvasAgg(figure)
    figure.savefig(path, dpi=110, metadata=metadata)
    return figure


def _panels(rows: int, columns: int, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(max(4.4 * columns, 6), height * rows), layout="constrained")
    axes = list(figure.subplots(rows, columns, squeeze=False).flat)
    for each in axes:
        each.grid(alpha=0.25)
        each.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw_lines(ours: Measurement, looks: Looks) -> Any:
    """Draw a panel for each group."""
    figure, axes = _panels(1, len(ours.groups), 3.8)
    if len(axes) == 1:  # the names of many lengths would lie over each other
        figure.set_figwidth(max(6, 3 + 0.6 * len(ours.columns)))
    shown, xs = {}, [_number(column) for column in ours.columns]
    for place, group in zip(axes, ours.groups, strict=True):
        for model in (model for g, model in ours.rows if g == group):
            values = [ours.typical(model, column, group) for column in ours.columns]
            # Words such as OOM, and what was not measured, are gaps in the line.
            ys = [math.nan if isinstance(y, str | None) else float(y) for y in values]
            (line,) = place.plot(xs, ys, label=model, markersize=5, linewidth=1.4, **looks[model])
            shown[model] = line
        place.set_xscale("log", base=2)
        place.set_xticks(xs, list(map(_short, xs)), fontsize=8)
        size = ours.columns[0].rpartition("=")[0] or "T"
        place.set_xlabel("T (tokens)" if size == "T" else size)
        place.set_ylabel(ours.unit or group)
        if ours.kind == "recall":
            place.set_ylim(0, _top(ours))
        elif numbers := [y for line in place.get_lines() for y in line.get_ydata() if y > 0]:
            # A panel of words alone, as where all is out of memory, has no range for a logarithm.
            if max(numbers) < WIDE * min(numbers):  # a logarithm would make gaps look larger
                place.set_ylim(0, 1.05 * max(numbers))
            else:
                place.set_yscale("log")
            place.yaxis.set_major_formatter("{x:,g}")
            low, high = place.get_ylim()
            place.yaxis.set_minor_formatter("{x:,g}" if high < 10 * low else "")
        place.set_title(group if ours.unit else "")
    figure.legend(shown.values(), shown, loc="outside right center", frameon=False)
    return figure


def _draw_dots(ours: Measurement, looks: Looks) -> Any:
    """Draw the losses of the first seed, if there are any, then a panel for each column.

    It has a line for each row with a dot for each seed or pass, the first row on top. The dots tell
    the colours of the losses.
    """
    curves, of = _curves(ours) if ours.kind == "training" else ({}, "")
    panels = len(ours.columns) + bool(curves)
    across = min(panels, 3)
    figure, axes = _panels(-(-panels // across), across, 1.2 + 0.25 * max(len(ours.rows), 8))
    if curves:
        first = axes.pop(0)
        for model, points in curves.items():
            steps, losses = zip(*points, strict=True)
            first.plot(steps, losses, label=model, linewidth=1.2, color=looks[model]["color"])
        first.set_xlabel(f"step{of}")
        first.set_ylabel("training loss (nats a token), first seed")
    for place, column in zip(axes, ours.columns, strict=False):
        names = []
        for y, (group, model) in enumerate(ours.rows):
            values = ours.by_seed(model, column, group).values()
            place.plot(values, [y] * len(values), linestyle="", alpha=0.8, **looks[model])
            word = ours.typical(model, column, group)
            name = f"{model}, {group}" if group else model
            names.append(f"{name}: {word}" if isinstance(word, str) else name)
        place.set_yticks(range(len(names)), names, fontsize=8)
        place.set_ylim(len(names) - 0.5, -0.5)
        unit = f" ({ours.unit})" if ours.unit not in ("", column) else ""
        place.set_xlabel(describe_place(column) + unit)
        if ours.kind == "recall":
            place.set_xlim(0, _top(ours))
        elif ours.kind == "speed" and place.get_xlim()[0] > 0:
            place.set_xlim(left=0)
    return figure


def _curves(ours: Measurement) -> tuple[dict[str, list[list[float]]], str]:
    """Return each model's losses by step with the first seed, and words for which run that is.

    Of several runs of a model, such as one for each learning rate, it is the best.
    """
    runs: dict[str, dict[str, Entry]] = {}
    for entry in ours.entries:
        if entry.seed == ours.seeds[0] and entry.details.get("steps", {}).get("train"):
            runs.setdefault(entry.model, {})[f"{entry.group} {entry.column}"] = entry
    curves = {}
    for model, found in runs.items():
        best = best_of({place: entry.value for place, entry in found.items()}, ours.better)
        curves[model] = found[best or next(iter(found))].details["steps"]["train"]
    several = any(len(found) > 1 for found in runs.values())
    return curves, " (each model's best run)" if several else ""


def _top(recall: Measurement) -> float:
    """Return where an axis of recall ends: a little above 100%, or above 1."""
    return 105 if recall.unit == "%" else 1.05


def _number(column: str) -> int:
    """Return a length such as 4K, or the number at the end of a column's name; 0 if it has none."""
    if length := re.fullmatch(r"(\d+)([KM])", column):
        return int(length[1]) * 2 ** {"K": 10, "M": 20}[length[2]]
    found = re.search(r"\d+$", column)
    return int(found[0]) if found else 0


def _short(x: int) -> str:
    """Write a whole number of M or K as such, and another length in full."""
    for size, letter in ((20, "M"), (10, "K")):
        if x >= 2**size and x % 2**size == 0:
            return f"{x >> size}{letter}"
    return str(x)
