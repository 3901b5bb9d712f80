"""Write the tables of committed results into the READMEs: `python tools/check_results.py`.

A README marks the place with two comments, `<!-- results -->` and `<!-- end of results -->`; a test
fails when what stands between them is not what the result files say.
"""

import json
import math
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
START, END = "<!-- results -->", "<!-- end of results -->"


def main() -> None:
    """Rewrite every README that has the marks."""
    for readme in ROOT.glob("packages/*/README.md"):
        text = readme.read_text(encoding="utf-8")
        if START in text:
            readme.write_text(updated(text, readme.parent / "results"), encoding="utf-8")


def updated(text: str, results: Path) -> str:
    """Return a README's text with the tables of `results` between its marks."""
    before, rest = text.split(START)
    _, after = rest.split(END)
    tables = [experiment_table(path) for path in sorted(results.glob("*/*.json"))]
    tables += [table for path in sorted(results.glob("*/*.jsonl")) for table in bench_tables(path)]
    return f"{before}{START}\n\n" + "\n\n".join(tables) + f"\n\n{END}{after}"


def experiment_table(path: Path) -> str:
    """Return one experiment's models and values, with what its trainings took."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if "cells" in content:
        return speed_table(path, content)
    if "tokens_per_second" in content["runs"][0]:
        return training_table(path, content)
    rows = [[row["model"], *(mean((v,)) for v in row["values"])] for row in content["rows"]]
    return drawn(path, content, ["Model", *content["columns"]], rows)


def training_table(path: Path, content: dict[str, Any]) -> str:
    """Return the models of an experiment: the mean over seeds and its spread, weights, speed.

    Models that were made of another also have their perplexity before any step. The speed is the
    fastest seed's: work that others have on a host only takes from it.
    """
    runs: dict[str, list[dict[str, Any]]] = {}
    values: dict[str, list[list[Any]]] = {}
    for run in content["runs"]:
        runs.setdefault(run["model"], []).append(run)
    for row in content["rows"]:
        values.setdefault(row["model"], []).append(row["values"])
    starts = {model: [perplexity_before(run) for run in seeds] for model, seeds in runs.items()}
    were_made = any(start is not None for seeds in starts.values() for start in seeds)
    rows = []
    for model, seeds in values.items():
        took = runs[model]
        before = "-" if None in starts[model] else over_seeds(tuple(starts[model]))
        rows.append(
            [
                model,
                f"{took[0]['parameters'] / 1e6:.1f}M",
                *([before] if were_made else []),
                *(over_seeds(column) for column in zip(*seeds, strict=True)),
                f"{max(run['tokens_per_second'] for run in took):,.0f}",
                str(max(run["peak_gb"] or 0.0 for run in took) or "-"),
            ]
        )
    start = ["PPL before"] if were_made else []
    speed = "tokens/s" if len(rows) == len(content["runs"]) else "tokens/s (fastest seed)"
    header = ["Model", "Weights", *start, *content["columns"], speed, "peak GB"]
    return drawn(path, content, header, rows)


def perplexity_before(run: dict[str, Any]) -> float | None:
    """Return the perplexity that a run started with, if it was evaluated before its first step."""
    return next((round(math.exp(loss), 1) for step, loss in run.get("val", ()) if step == 0), None)


def over_seeds(values: tuple[Any, ...]) -> str:
    """Write one value as it is, several as their mean and the highest minus the lowest."""
    if len(values) == 1:
        return str(values[0])
    spread = f"{max(values) - min(values):.2g}"
    return f"{sum(values) / len(values):.5g} ({len(values)} seeds, spread {spread})"


def drawn(path: Path, content: dict[str, Any], header: list[str], rows: list[list[str]]) -> str:
    """Return a table under the line that says what was measured."""
    lines = [
        f"**{where(content)}**, {content['setting']} ({path.parent.name}/{path.name}):",
        "",
        f"| {' | '.join(header)} |",
        "|---|" + "---|" * (len(header) - 1),
    ]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def speed_table(path: Path, content: dict[str, Any]) -> str:
    """Return the mean over passes of a table of speeds, and its peak memory where it was counted.

    A dash stands for what was not measured, OOM for what does not fit the GPU.
    """
    peaks: dict[tuple[str, str], float] = {}
    for cell in content["cells"]:
        if "peak_gb" in cell:
            key = (cell["group"], cell["model"])
            peaks[key] = max(peaks.get(key, 0.0), cell["peak_gb"])
    lines: dict[tuple[str, str], list[list[Any]]] = {}
    for row in content["rows"]:
        lines.setdefault((row.get("group", ""), row["model"]), []).append(row["values"])
    header = [*content["columns"], *(["peak GB"] if peaks else [])]
    text = [
        f"**{where(content)}**, {content['unit']}: {content['setting']} "
        f"({path.parent.name}/{path.name}; OOM: out of memory; a dash: not measured):",
        "",
        f"| Model | {' | '.join(header)} |",
        "|---|" + "---|" * len(header),
    ]
    for (group, model), runs in lines.items():
        cells = [mean(values) for values in zip(*runs, strict=True)]
        if peaks:
            peak = peaks.get((group, model))
            cells.append("-" if peak is None else f"{peak:.1f}")
        name = f"{model}, {group}" if group else model
        text.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(text)


def mean(values: tuple[Any, ...]) -> str:
    """Write the mean over passes with four digits, or the word that stands for a number."""
    if isinstance(values[0], str):
        return values[0]
    value = sum(values) / len(values)
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def bench_tables(path: Path) -> list[str]:
    """Return the times of layers, of ops and of decoding steps, where there are any."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    timed = [row for row in rows if row["name"].endswith((" forward", " train"))]
    tables = []
    for level in ("layer", "op"):
        found = [row for row in timed if f" {level} " in row["name"]]
        if found:
            tables.append(phases_table(path, level, found))
    decoding = [row for row in rows if row["name"].endswith(" layer decode")]
    return tables + ([decode_table(path, decoding)] if decoding else [])


def phases_table(path: Path, level: str, rows: list[dict[str, Any]]) -> str:
    """Return a line a layer or op, and a pair of columns (forward, training) a length."""
    shapes = sorted({(row["shape"]["T"], row["shape"]["B"]) for row in rows})
    tokens = {T * B for T, B in shapes}
    times: dict[str, dict[tuple[int, int, str], str]] = {}
    for row in rows:
        line = times.setdefault(label(row, level), {})
        place = (row["shape"]["T"], row["shape"]["B"], row["name"].rsplit(" ", 1)[1])
        line[place] = f"{row['ms']:.{1 if level == 'layer' else 2}f}"
    width = f", C {rows[0]['shape']['C']}" if "C" in rows[0]["shape"] else ""
    batch = f", {max(tokens):,} tokens a batch" if len(tokens) == 1 else ""
    lines = [
        f"**{where(rows[0])}**, one {level}, forward / forward + backward in ms{width}{batch} "
        f"({path.parent.name}/{path.name}; a dash: not measured, or out of memory):",
        "",
        f"| {level.capitalize()} | "
        + " | ".join(f"T = {T}" if len(tokens) == 1 else f"B = {B}, T = {T}" for T, B in shapes)
        + " |",
        "|---|" + "---|" * len(shapes),
    ]
    for name, line in times.items():
        pairs = (
            f"{line.get((*s, 'forward'), '-')} / {line.get((*s, 'train'), '-')}" for s in shapes
        )
        lines.append(f"| {name} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def decode_table(path: Path, rows: list[dict[str, Any]]) -> str:
    """Return the time of one token of one sequence through each layer."""
    lines = [
        f"**{where(rows[0])}**, one token of one sequence through one layer, C "
        f"{rows[0]['shape']['C']} ({path.parent.name}/{path.name}):",
        "",
        "| Layer | ms |",
        "|---|---|",
    ]
    lines += [f"| {label(row, 'layer')} | {row['ms']:.4f} |" for row in rows]
    return "\n".join(lines)


def label(row: dict[str, Any], level: str) -> str:
    """Name a row: what it measures, the sizes that tell it from others, who computes."""
    sizes = "".join(f", {x} = {row['shape'][x]}" for x in ("L", "M") if x in row["shape"])
    return f"{row['name'].split(f' {level} ')[0]}{sizes} ({row['impl']})"


def where(row: dict[str, Any]) -> str:
    """Return the GPU of a row, or its processor."""
    return row["gpu"] or f"CPU ({row['cpu']})"


if __name__ == "__main__":
    main()
