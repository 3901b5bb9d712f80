"""Draws the report's figures as PNG files: curves, bars with their spread, lines over lengths."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]

MARKERS = "osD^vPX*"


def draw_curves(
    curves: Mapping[str, Points], path: Path, *, xlabel: str, ylabel: str, smooth: int = 1
) -> None:
    """Draw one line for each name; each point is the average of `smooth` neighbouring points."""
    axes = _axes(xlabel, ylabel)
    for name, points in curves.items():
        xs, ys = _running_mean(points, smooth)
        axes.plot(xs, ys, label=name, linewidth=1.4)
    axes.legend(frameon=False)
    _save(axes, path)


def draw_bars(
    values: Mapping[str, Sequence[float]], path: Path, *, ylabel: str, printed: bool = True
) -> None:
    """Draw one bar for each name: the mean over seeds, with a whisker from lowest to highest.

    The axis starts near the lowest value and not at zero, to show the differences. `printed` writes
    the mean on each bar.
    """
    axes = _axes("", ylabel)
    means = [sum(v) / len(v) for v in values.values()]
    low = [mean - min(v) for mean, v in zip(means, values.values(), strict=True)]
    high = [max(v) - mean for mean, v in zip(means, values.values(), strict=True)]
    places = range(len(means))
    bars = axes.bar(places, means, yerr=[low, high], capsize=5, color="#7aa6d6", width=0.6)
    axes.set_xticks(places, list(values), rotation=15)
    everything = [x for v in values.values() for x in v]
    margin = 0.5 * (max(everything) - min(everything)) or 0.1 * max(everything)
    axes.set_ylim(max(0.0, min(everything) - margin), max(everything) + margin)
    if printed:
        axes.bar_label(bars, labels=[f"{mean:.3g}" for mean in means], padding=6)
    _save(axes, path)


def draw_lengths(
    panels: Mapping[str, Mapping[str, Points]], path: Path, *, xlabel: str = "T (tokens)"
) -> None:
    """Draw one panel for each quantity and one line for each model, with logarithmic axes."""
    figure = _figure(4.6 * len(panels))
    for axes, (ylabel, series) in zip(_panels(figure, len(panels)), panels.items(), strict=True):
        for marker, (name, points) in zip(MARKERS, series.items(), strict=False):
            axes.plot(*zip(*points, strict=True), marker=marker, markersize=4, label=name)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel(xlabel)
        axes.set_ylabel(ylabel)
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)


def _axes(xlabel: str, ylabel: str) -> Any:
    axes = _figure(7.5).subplots()
    axes.set_xlabel(xlabel)
    axes.set_ylabel(ylabel)
    axes.grid(axis="y", alpha=0.25)
    return axes


def _figure(width: float) -> Any:
    # matplotlib's object interface, with the Agg canvas, does not change its global state.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _panels(figure: Any, count: int) -> list[Any]:
    return list(figure.subplots(1, count, squeeze=False)[0])


def _save(axes: Any, path: Path) -> None:
    axes.figure.savefig(path, dpi=120)


def _running_mean(points: Points, smooth: int) -> tuple[list[float], list[float]]:
    xs, ys = [], []
    for end in range(smooth, len(points) + 1):
        part = points[end - smooth : end]
        xs.append(part[-1][0])
        ys.append(sum(y for _, y in part) / smooth)
    return xs, ys
