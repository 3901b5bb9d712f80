"""The speed of an op beside others: its forward, and with its backward."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezzo_core.reproduction.result_file import Cell, Entry
from mezzo_core.reproduction.runner import Job, passes
from mezzo_core.reproduction.timing import attempt, measure

Op = Callable[..., Tensor]


@dataclass(frozen=True)
class Contender:
    """A function of tensors that is timed.

    "train" computes the gradients of all inputs: parameters are used as they are, other tensors are
    detached.
    """

    run: Op  # called with `inputs` by name
    inputs: Mapping[str, Tensor]

    def time(self, phase: str, device: torch.device, seconds: float) -> list[Any]:
        """Time a phase, "forward" or "train", once."""
        leaves = {
            name: x if x.requires_grad else x.detach().requires_grad_()
            for name, x in self.inputs.items()
        }
        dout: list[Tensor] = []  # of the first call, which is not timed

        def train() -> None:
            out = self.run(**leaves)
            dout[:] = dout or [torch.randn_like(out)]
            torch.autograd.grad(out, tuple(leaves.values()), dout, allow_unused=True)

        work = train if phase == "train" else torch.no_grad()(partial(self.run, **leaves))
        return [measure(work, device, seconds=seconds)]


def op_job(
    name: str,
    impl: str,
    column: str,
    make: Callable[[torch.device], Contender],
    seconds: float,
    phases: Sequence[str] = ("forward", "train"),
) -> Job:
    """Return the job that times an op in the rows "NAME PHASE (IMPL)", one of each phase.

    The column tells the sizes, see `shape`; `make` builds the inputs.
    """
    cells = {Cell(f"{name} {phase} ({impl})", column): phase for phase in phases}
    return Job(tuple(cells), partial(_time, cells, make, seconds))


def _time(
    cells: Mapping[Cell, str],
    make: Callable[[torch.device], Contender],
    seconds: float,
    missing: tuple[Cell, ...],
    folder: Path,
    device: torch.device,
) -> Iterator[list[Entry]]:
    contender = make(device)
    for cell in missing:
        found = attempt(partial(contender.time, cells[cell], device, seconds))
        yield passes(cell, found, "ms")


def shape(**sizes: int) -> str:
    """Return sizes in words, such as "B8 T2048"."""
    return " ".join(f"{letter}{size}" for letter, size in sizes.items())
