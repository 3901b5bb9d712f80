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
    runs = {(run["model"], run["seed"]): run for run in content["runs"]}
    lines = [
        f"**{content['gpu']}**, {content['setting']} ({path.parent.name}/{path.name}):",
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
