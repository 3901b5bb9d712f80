"""A sweep over models, widths and learning rates on MQAR."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from mezzo_core.bench import Result, origin
from mezzo_core.bench.result import Say
from mezzo_core.bench.sweep import Sweep, best_runs
from mezzo_core.device import choose_device

from mezzo_gsa.mqar.protocols import NAMES, SOLVED, SweepConfig


class Choice(NamedTuple):
    """A model at one width, which gets an entry of a result."""

    config: SweepConfig
    """What its runs share."""
    model: str
    """Of `NAMES`."""
    width: int
    """C."""
    row: str | None = None
    """The model's name in the result; None: that of `NAMES`."""

    @property
    def place(self) -> tuple[str, str, int]:
        """The row and the column of the entry, and its seed."""
        return self.row or NAMES[self.model], f"C={self.width}", self.config.task.seed

    def trainings(self, runs: Path) -> Sweep:
        """Return the trainings, with each learning rate, whose folders are in `runs`."""
        config, model, width, row = self
        seed = config.task.seed
        return Sweep(
            f"{row or model} C={width} seed {seed}",
            [config.run(model, width, lr) for lr in config.learning_rates],
            runs / config.name / f"{model}_c{width}_seed{seed}",
            enough=SOLVED if config.skip_solved else None,
        )


def sweep(
    config: SweepConfig,
    out: Path,
    say: Say,
    *,
    runs: Path | None = None,
    device: str | torch.device | None = None,
) -> Result:
    """Train everything that `config` asks for, narrow models first, and return the result.

    It gets an entry for each model and width, see `add_best`. A sweep that was killed goes on: runs
    resume from their own folders, and finished ones are only read.

    Args:
        config: what to run.
        out: the folder of the result.
        say: called with a line of text as the sweep goes on.
        runs: the folder of the runs' folders; None: `out`.
        device: None takes a GPU if there is one.

    Raises:
        UserError: if a model cannot have a width, `out` has the result of another sweep or cannot
            be written, or there is no such device.
    """
    places = product(sorted(config.widths), config.models)
    choices = [Choice(config, model, width) for width, model in places]
    for choice in choices:  # what cannot be built is refused before hours of training
        config.state_bytes(choice.model, choice.width)
    chosen = choose_device(device, None)
    result = Result(out / f"{config.name}.json", config.header(), origin(chosen), say)
    add_best(result, choices, say, runs=runs or out, device=chosen)
    return result


def add_best(
    result: Result,
    choices: Sequence[Choice],
    say: Say,
    *,
    runs: Path,
    device: torch.device,
    jobs: int = 1,
) -> None:
    """Train each choice with each learning rate, and add its best, if it is missing.

    The entry has the best accuracy, with that run's details, and those of the `others`.

    Args:
        result: gets the entries.
        choices: the models.
        say: called with a line about each run.
        runs: the folder of the runs' folders.
        device: where to train.
        jobs: choices trained at the same time, see `best_runs`.

    Raises:
        UserError: if a model cannot have its width.
    """
    wanted = {each.place: each for each in choices}  # what is chosen twice counts once
    missing = [
        each
        for (row, column, seed), each in wanted.items()
        if not result.has(row, column, seed=seed)
    ]
    states = [each.config.state_bytes(each.model, each.width) for each in missing]
    sweeps = [each.trainings(runs) for each in missing]
    for i, best in best_runs(sweeps, device, say, jobs, swept=("lr",)):
        (row, column, seed), value = missing[i].place, best.pop("accuracy")
        result.add(value, model=row, column=column, seed=seed, state_bytes=states[i], **best)
