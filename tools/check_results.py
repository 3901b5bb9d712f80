"""Write the tables of committed results into the READMEs: `python tools/check_results.py`.

A README marks the place with two comments, `<!-- results -->` and `<!-- end of results -->`; a test
fails when what stands between them is not what the result files say.
"""

import json
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
    tables += [layer_table(path) for path in sorted(results.glob("*/*.jsonl"))]
    return f"{before}{START}\n\n" + "\n\n".join(tables) + f"\n\n{END}{after}"


def experiment_table(path: Path) -> str:
    """Return one experiment's models, values and speeds."""
    content = json.loads(path.read_text(encoding="utf-8"))
    if "cells" in content:
        return speed_table(path, content)
    runs = {(run["model"], run["seed"]): run for run in content["runs"]}
    lines = [
        f"**{where(content)}**, {content['setting']} ({path.parent.name}/{path.name}):",
        "",
        f"| Model | Weights | {' | '.join(content['columns'])} | tokens/s | peak GB |",
        "|---|---|" + "---|" * (len(content["columns"]) + 2),
    ]
    for row in content["rows"]:
        run = runs[row["model"], row["seed"]]
        values = " | ".join(str(value) for value in row["values"])
        lines.append(
            f"| {row['model']} | {run['parameters'] / 1e6:.1f}M | {values} "
            f"| {run['tokens_per_second']:,} | {run['peak_gb']} |"
        )
    return "\n".join(lines)


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


def layer_table(path: Path) -> str:
    """Return the times of single layers, a line a layer and a pair of columns a length."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if " layer " in row["name"]]
    lengths = sorted({row["shape"]["T"] for row in rows})
    times: dict[str, dict[tuple[int, str], str]] = {}
    for row in rows:
        name, phase = row["name"].split(" layer ")
        size = f", L = {row['shape']['L']}" if "L" in row["shape"] else ""
        line = times.setdefault(f"{name}{size} ({row['impl']})", {})
        line[row["shape"]["T"], phase] = f"{row['ms']:.1f}"
    header = " | ".join(f"T = {length}" for length in lengths)
    lines = [
        f"**{where(rows[0])}**, one layer, forward / forward + backward in ms, C "
        f"{rows[0]['shape']['C']}, {rows[0]['shape']['B'] * rows[0]['shape']['T']:,} tokens a "
        f"batch ({path.parent.name}/{path.name}; a dash: out of memory):",
        "",
        f"| Layer | {header} |",
        "|---|" + "---|" * len(lengths),
    ]
    for name, line in times.items():
        pairs = (
            f"{line.get((length, 'forward'), '-')} / {line.get((length, 'train'), '-')}"
            for length in lengths
        )
        lines.append(f"| {name} | {' | '.join(pairs)} |")
    return "\n".join(lines)


def where(row: dict[str, Any]) -> str:
    """Return the GPU of a row, or its processor."""
    return row["gpu"] or f"CPU ({row['cpu']})"


if __name__ == "__main__":
    main()
