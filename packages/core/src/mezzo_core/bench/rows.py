"""The rows of bench.jsonl: single speeds of ops, layers and models, that a `bench` command prints.

A row is one JSON object on a line, with the keys kind ("op", "layer" or "model"), name, impl,
shape, those of `Timing`, and those of `origin`.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezzo_core.bench.origin import origin
from mezzo_core.bench.result import Say, check_origin
from mezzo_core.bench.timing import Timing, measure
from mezzo_core.config_json import check_fields
from mezzo_core.errors import UserError
from mezzo_core.files import is_number


@dataclass(frozen=True)
class Row:
    """One measurement."""

    name: str  # "<package or op> <op|layer|model> <forward|train|decode>"
    impl: str  # the implementation
    shape: dict[str, int]  # sizes by the glossary's letters
    timing: Timing

    def to_json(self, origin: Mapping[str, Any]) -> dict[str, Any]:
        """Return the row as JSON values, with the machine and the software."""
        return {
            "kind": self.name.split()[-2],
            "name": self.name,
            "impl": self.impl,
            "shape": self.shape,
            **asdict(self.timing),
            **origin,
        }

    def __str__(self) -> str:
        timing = self.timing
        shape = " ".join(f"{letter}{size}" for letter, size in self.shape.items())
        host = "" if timing.host_ms is None else f", host {timing.host_ms:.3f} ms"
        peak = "" if timing.peak_gb is None else f", peak {timing.peak_gb:.2f} GB"
        return (
            f"{self.name:31} {self.impl:22} {shape:36}{timing.ms:9.3f} ms "
            f"({timing.ms_p20:.3f} to {timing.ms_p80:.3f}){host}{peak}"
        )


def read_row(found: Any) -> Row:
    """Return the row whose JSON values these are.

    Raises:
        KeyError: if a value is missing.
        TypeError, UserError: if one has another type, or is no finite number.
    """
    if not isinstance(found, dict):
        raise TypeError(f"a row must be an object, got {found!r:.60}")
    check_origin(found)
    times: dict[str, Any] = {each.name: found.get(each.name) for each in fields(Timing)}
    timing = Timing(**times)
    row = Row(found["name"], found["impl"], found["shape"], timing)
    check_fields(timing)
    check_fields(row)
    if not all(type(size) is int for size in row.shape.values()):
        raise TypeError(f"shape must have whole numbers, got {row.shape!r:.60}")
    if not all(value is None or is_number(value) for value in vars(timing).values()):
        raise UserError(f"the times must be finite, got {timing!r:.100}")
    return row


def run(
    rows: Iterable[Row], device: torch.device, out: Path | None, say: Say
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
    where, written = origin(device), []
    for row in rows:
        written.append(row.to_json(where))
        say(str(row))
        if out is not None:
            out.parent.mkdir(parents=True, exist_ok=True)
            with out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(written[-1]) + "\n")
    return written


@dataclass(frozen=True)
class Contender:
    """An op, or any function of tensors, that is timed: its forward, and with its backward.

    "train" computes the gradients of all inputs: parameters are used as they are, other tensors are
    detached.
    """

    name: str  # of its rows, without the phase
    impl: str
    shape: dict[str, int]
    run: Callable[..., Tensor]  # called with `inputs` by name
    inputs: Mapping[str, Tensor]
    phases: Sequence[str] = ("forward", "train")  # those that are timed


def timed(contender: Contender, device: torch.device, seconds: float, say: Say) -> Iterator[Row]:
    """Time a contender; a phase that does not fit into the GPU is said and left out."""
    leaves = {
        name: x if x.requires_grad else x.detach().requires_grad_()
        for name, x in contender.inputs.items()
    }

    def forward() -> Tensor:
        return contender.run(**leaves)

    dout: list[Tensor] = []  # of the first call, which is not timed

    def train() -> None:
        out = forward()
        dout[:] = dout or [torch.randn_like(out)]
        torch.autograd.grad(out, tuple(leaves.values()), dout, allow_unused=True)

    works = {"forward": torch.no_grad()(forward), "train": train}
    for phase in contender.phases:
        name = f"{contender.name} {phase}"
        try:
            timing = measure(works[phase], device, seconds=seconds)
        except torch.OutOfMemoryError:
            say(f"{name} ({contender.impl}) at {contender.shape}: out of memory")
            continue
        yield Row(name, contender.impl, contender.shape, timing)
