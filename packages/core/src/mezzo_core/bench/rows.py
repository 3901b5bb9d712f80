"""The rows of bench.jsonl: single speeds of ops, layers and models, that a `bench` command prints.

A row is one JSON object on a line, with the keys kind ("op", "layer" or "model"), name, impl,
shape, those of `Timing`, tflops, and those of `origin`.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mezzo_core.bench.origin import origin
from mezzo_core.bench.timing import Timing


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        name: "<package or op> <op|layer|model> <forward|train|decode>".
        impl: the implementation.
        shape: sizes by the glossary's letters.
        timing: what was measured.
        flops: of one call; None if they are not counted.
    """

    name: str
    impl: str
    shape: dict[str, int]
    timing: Timing
    flops: float | None = None

    def to_json(self, origin: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as JSON values, with the machine and the software."""
        return {
            "kind": self.name.split()[-2],
            "name": self.name,
            "impl": self.impl,
            "shape": self.shape,
            **asdict(self.timing),
            "tflops": None if self.flops is None else self.flops / self.timing.ms / 1e9,
            **origin,
        }


def run(
    rows: Iterable[Row], device: torch.device, out: Path | None, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Describe each row as soon as it is measured, and append it to a file.

    Args:
        rows: measured while they are iterated over.
        device: where they are measured.
        out: a .jsonl file; None writes nothing.
        say: called with a line about each row.

    Returns:
        The rows as JSON values.
    """
    where = origin(device)
    written = []
    for row in rows:
        written.append(row.to_json(where))
        say(describe(row))
        if out is not None:
            append(out, written[-1:])
    return written


def append(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append rows to a .jsonl file, one object a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def describe(row: Row) -> str:
    """Return a row as a line of text."""
    timing = row.timing
    shape = " ".join(f"{letter}{size}" for letter, size in row.shape.items())
    host = "" if timing.host_ms is None else f", host {timing.host_ms:.3f} ms"
    peak = "" if timing.peak_gb is None else f", peak {timing.peak_gb:.2f} GB"
    return (
        f"{row.name:31} {row.impl:22} {shape:36}{timing.ms:9.3f} ms "
        f"({timing.ms_p20:.3f} to {timing.ms_p80:.3f}){host}{peak}"
    )
