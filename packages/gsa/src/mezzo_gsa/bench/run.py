"""The whole benchmark: runs its parts, and prints and writes each row."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import append, origin
from mezzo_core.errors import UserError, nearest
from rich.console import Console

from mezzo_gsa.bench.benchmark import CPU, GPU, QUICK, Benchmark
from mezzo_gsa.bench.layers import decode_rows, layer_rows
from mezzo_gsa.bench.models import model_rows
from mezzo_gsa.bench.ops import attention_rows, gla_rows, gsa_rows

MAKERS = {
    "op": gsa_rows,
    "gla": gla_rows,
    "attention": attention_rows,
    "layer": layer_rows,
    "decode": decode_rows,
    "model": model_rows,
}
PARTS = (*MAKERS, "fla")
"""The parts of the benchmark; "fla" adds rows of fla to the other parts."""


def bench(
    device: torch.device,
    quick: bool = False,
    out: Path | None = None,
    *,
    parts: Sequence[str] = PARTS,
    commit: str | None = None,
) -> list[dict[str, Any]]:
    """Measure ops, layers and tiny models on `device`, print each row, append it to `out`.

    fla (flash-linear-attention) is measured where it is installed.

    Args:
        device: where to measure.
        quick: use tiny shapes, which take seconds.
        out: a .jsonl file; None writes nothing.
        parts: of PARTS.
        commit: of the code; None: the checkout's.

    Raises:
        UserError: if a part is unknown, or an op or a layer is wrong.
    """
    for part in parts:
        if part not in PARTS:
            raise UserError(f"no part is named {part!r}{nearest(part, PARTS)}")
    say = partial(Console().print, markup=False, highlight=False, soft_wrap=True)
    shapes = QUICK if quick else GPU if device.type == "cuda" else CPU
    benchmark = Benchmark(shapes, device, say, with_fla="fla" in parts)
    where = origin(device)
    rows = []
    for part in filter(parts.__contains__, MAKERS):
        for row in MAKERS[part](benchmark):
            written = row.to_json(where)
            written["commit"] = commit or written["commit"]
            rows.append(written)
            say(describe(written))
            if out is not None:
                append(out, [written])
    return rows


def describe(row: Mapping[str, Any]) -> str:
    """Return a row as a line of text."""
    shape = " ".join(f"{letter}{size}" for letter, size in row["shape"].items())
    peak = "" if row["peak_gb"] is None else f", peak {row['peak_gb']:.2f} GB"
    return (
        f"{row['name']:24}{row['impl']:24}{shape:36}{row['ms']:9.3f} ms "
        f"({row['ms_p20']:.3f} to {row['ms_p80']:.3f}){peak}"
    )
