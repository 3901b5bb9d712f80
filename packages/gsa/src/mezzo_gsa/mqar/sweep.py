"""Runs a sweep over models, widths and learning rates, and writes its result."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import Result, origin
from mezzo_core.bench.training import DIVERGED, measure_run
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import DivergenceError

from mezzo_gsa.mqar.config import NAMES, SOLVED, SweepConfig


def sweep(
    config: SweepConfig,
    out: Path,
    say: Callable[[str], None],
    *,
    runs: Path | None = None,
    device: str | torch.device | None = None,
) -> Result:
    """Train everything that `config` asks for, narrow models first, and return the result.

    It gets an entry for each model and width, after its last learning rate: the best accuracy, with
    that run's details, and those of the `others`. A sweep that was killed goes on where it was:
    runs resume from their own folders, and finished ones are only read.

    Args:
        config: what to run.
        out: the folder of the result.
        say: called with a line of text as the sweep goes on.
        runs: the folder of the runs' folders; None: `out`.
        device: "cpu" or "cuda"; None takes a GPU if there is one.

    Raises:
        UserError: if a model cannot have a width, `out` has the result of another sweep or cannot
            be written, or there is no such device.
    """
    choices = list(product(sorted(config.widths), config.models))
    state_bytes = {choice: _state_bytes(config, *choice) for choice in choices}
    chosen = choose_device(device, None)
    result = Result(out / f"{config.name}.json", config.header(), origin(chosen), say)
    for width, model in choices:
        place = {"model": NAMES[model], "column": f"C={width}"}
        if result.has(**place, seed=config.task.seed):
            continue
        found: list[dict[str, Any]] = []
        for lr in config.learning_rates:
            if config.skip_solved and any(_accuracy(run) > SOLVED for run in found):
                say(f"{model} C={width}: no other learning rates, as {found[-1]['lr']:g} solved it")
                break
            folder = (runs or out) / config.name / f"{model}_c{width}_lr{lr:g}"
            found.append(_run(config.run(model, width, lr), folder, chosen))
            say(f"{model} C={width} lr {lr:g}: {found[-1]['accuracy']}")
        found.sort(key=_accuracy, reverse=True)
        best = found.pop(0)
        value = best.pop("accuracy")
        best |= {"state_bytes": state_bytes[width, model], "others": found or None}
        result.add(value, **place, seed=config.task.seed, **best)
    return result


def _run(config: TrainConfig, folder: Path, device: torch.device) -> dict[str, Any]:
    """Train, or read a finished run; return its accuracy, or "diverged", and its details."""
    try:
        found = measure_run(config, folder, device, resume=True)
    except DivergenceError:
        found = {"accuracy": DIVERGED}
    found.pop("perplexity", None)
    return {"lr": config.optim.lr, **found}


def _accuracy(run: dict[str, Any]) -> float:
    """Return a run's accuracy, below all others if the training diverged."""
    return -1.0 if isinstance(run["accuracy"], str) else run["accuracy"]


def _state_bytes(config: SweepConfig, width: int, model: str) -> int:
    """Return a row's bytes of state; refuse what cannot be built before hours of training."""
    try:
        with torch.device("meta"):
            built = config.run(model, width, config.learning_rates[0]).model.build()
    except ValueError as error:
        raise UserError(f"{model} cannot have width {width}: {error}") from error
    return built.state_bytes(config.task.seq_len)
