"""A sweep over models, widths and learning rates on MQAR."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from mezzo_core.bench import Result, origin
from mezzo_core.bench.sweep import best_run
from mezzo_core.device import choose_device

from mezzo_gsa.mqar.protocols import NAMES, SOLVED, SweepConfig


def sweep(
    config: SweepConfig,
    out: Path,
    say: Callable[[str], None],
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
    choices = [(model, width) for width, model in product(sorted(config.widths), config.models)]
    for choice in choices:  # what cannot be built is refused before hours of training
        config.state_bytes(*choice)
    chosen = choose_device(device, None)
    result = Result(out / f"{config.name}.json", config.header(), origin(chosen), say)
    for model, width in choices:
        add_best(result, config, model, width, say, runs=runs or out, device=chosen)
    return result


def add_best(
    result: Result,
    config: SweepConfig,
    model: str,
    width: int,
    say: Callable[[str], None],
    *,
    runs: Path,
    device: torch.device,
    row: str | None = None,
) -> None:
    """Train a model at one width with each learning rate, and add the best, if it is missing.

    The entry has the best accuracy, with that run's details, and those of the `others`.

    Args:
        result: gets the entry.
        config: what all runs share.
        model: of `NAMES`.
        width: C.
        say: called with a line about each run.
        runs: the folder of the runs' folders.
        device: where to train.
        row: the model's name in the result; None: that of `NAMES`.

    Raises:
        UserError: if the model cannot have this width.
    """
    place = {"model": row or NAMES[model], "column": f"C={width}"}
    if result.has(**place, seed=config.task.seed):
        return
    state_bytes = config.state_bytes(model, width)
    best = best_run(
        f"{row or model} C={width}",
        [config.run(model, width, lr) for lr in config.learning_rates],
        runs / config.name / f"{model}_c{width}",
        device,
        say,
        swept=("lr",),
        enough=SOLVED if config.skip_solved else None,
    )
    best["state_bytes"] = state_bytes
    result.add(best.pop("accuracy"), **place, seed=config.task.seed, **best)
