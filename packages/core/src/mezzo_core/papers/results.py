"""Reads the measured results that a package keeps under `results/<gpu>/`.

An experiment is one JSON file, with one row for each model and seed:

    {"id": ["rat.table9", "rat.claim.reversed_worse"], "same_setting": false, "gpu": "NVIDIA H200",
     "columns": ["T=8192"], "rows": [{"model": "Attention", "seed": 0, "values": [13.2]}],
     "setting": "...", "unit": "perplexity", "better": "lower",
     "torch": "2.11.0", "triton": "3.6.0", "commit": "...", "date": "2026-01-31"}

`id` has the ids of all tables and claims that the rows answer. `same_setting` is true if model,
data and lengths are the paper's own: then an order that agrees is "reproduced", and an order that
does not agree "differs". Otherwise the status is "scaled down". A row may have a `group`. Speeds
are bench rows, one JSON object on each line of a `*.jsonl` file.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.papers.finding import Measurement, ResultRow
from mezzo_core.papers.published import Value

BENCH_KEYS = ("name", "impl", "shape", "ms", "ms_p20", "ms_p80", "gpu")


@dataclass(frozen=True)
class Experiment:
    """A committed measurement, and the ids of the tables and claims that it answers."""

    ids: tuple[str, ...]
    same_setting: bool
    better: str
    measurement: Measurement
    source: str


def load_experiments(folder: Path) -> list[Experiment]:
    """Read all experiments below a `results` folder; none if there is no such folder.

    Raises:
        UserError: if a file is not an experiment; the message names the file and the error.
    """
    return [_read_experiment(path) for path in sorted(folder.glob("*/*.json"))]


def load_bench(folder: Path) -> list[dict[str, Any]]:
    """Read all bench rows below a `results` folder, in the order of the files.

    Raises:
        UserError: if a line is not JSON or lacks a key; the message names the file and line.
    """
    rows = []
    for path in sorted(folder.glob("*/*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(f"{path}, line {number}: not JSON: {error}") from error
            missing = [key for key in BENCH_KEYS if key not in row]
            if missing:
                raise UserError(f"{path}, line {number}: no {', '.join(missing)}")
            rows.append(row)
    return rows


def _read_experiment(path: Path) -> Experiment:
    try:
        return _experiment(json.loads(path.read_text(encoding="utf-8")), path.name)
    except json.JSONDecodeError as error:
        raise UserError(f"{path}: not JSON: {error}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: no experiment, see mezzo_core.papers.results: {error}") from error


def _experiment(content: dict[str, Any], source: str) -> Experiment:
    names, columns = content["id"], tuple(content["columns"])
    runs: dict[tuple[str, str], dict[int, tuple[Value, ...]]] = {}
    # Sorted by seed, so that models with the same seeds have them in the same order.
    for row in sorted(content["rows"], key=lambda row: row.get("seed", 0)):
        if len(row["values"]) != len(columns):
            raise ValueError(f"{row['model']} has not one value a column")
        of_model = runs.setdefault((row.get("group", ""), row["model"]), {})
        seed = row.get("seed", len(of_model))
        if seed in of_model:
            raise ValueError(f"{row['model']} has two rows of seed {seed}")
        of_model[seed] = tuple(row["values"])
    measurement = Measurement(
        columns=columns,
        rows=tuple(
            ResultRow(model, tuple(each.values()), group, tuple(each))
            for (group, model), each in runs.items()
        ),
        setting=content["setting"],
        unit=content.get("unit", ""),
        seeds=tuple(sorted({row["seed"] for row in content["rows"] if "seed" in row})),
        device=content["gpu"] or "CPU",
        torch=content["torch"],
        triton=content.get("triton") or "",
        commit=content["commit"] or "",
        date=content["date"],
    )
    return Experiment(
        ids=(names,) if isinstance(names, str) else tuple(names),
        same_setting=bool(content["same_setting"]),
        better=content["better"],
        measurement=measurement,
        source=source,
    )
