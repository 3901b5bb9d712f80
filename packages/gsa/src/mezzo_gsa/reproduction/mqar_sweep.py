"""A sweep over models, widths and learning rates on MQAR, as a list of what to train."""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
from mezzo_core.device import choose_device
from mezzo_core.reproduction import Cell, Result, origin, say
from mezzo_core.reproduction.runner import Job, run
from mezzo_core.reproduction.training import Tuning

from mezzo_gsa.reproduction.mqar_protocols import NAMES, SOLVED, SweepConfig


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

    def job(self, runs: Path) -> Job:
        """Return the job that trains it with each learning rate, in folders in `runs`.

        Raises:
            UserError: if the model cannot have this width.
        """
        config, model, width, row = self
        seed, state_bytes = config.task.seed, config.state_bytes(model, width)
        return Tuning(
            f"{row or model} C={width} seed {seed}",
            (Cell(row or NAMES[model], f"C={width}", seed=seed),),
            [config.run(model, width, lr) for lr in config.learning_rates],
            runs / config.name / f"{model}_c{width}_seed{seed}",
            enough=SOLVED if config.skip_solved else None,
            details={"state_bytes": state_bytes},
        ).job


def choices(config: SweepConfig, models: Sequence[str]) -> list[Choice]:
    """Return models at all widths, narrow ones first."""
    return [Choice(config, *each[::-1]) for each in product(sorted(config.widths), models)]


def sweep(config: SweepConfig, out: Path, *, device: str | torch.device | None = None) -> Result:
    """Train everything that `config` asks for, narrow models first, and return the result.

    A sweep that was killed goes on: runs resume from their own folders, and finished ones are only
    read.

    Args:
        config: what to run.
        out: the folder of the result and of the runs' folders.
        device: None takes a GPU if there is one.

    Raises:
        UserError: if a model cannot have a width, `out` has the result of another sweep or cannot
            be written, or there is no such device.
    """
    jobs = [choice.job(out) for choice in choices(config, config.models)]
    chosen = choose_device(device, None)
    result = Result(out / f"{config.name}.json", config.header(), origin(chosen), say)
    run(result, jobs, out, chosen)
    return result
