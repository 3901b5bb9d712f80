"""Runs a sweep over models, widths and learning rates, and writes its result."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import Result, origin
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import DivergenceError, train

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
    sizes = {choice: _sizes(config, *choice) for choice in choices}
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
            if config.compile:
                torch.compiler.reset()  # models of other runs would use up its limit of versions
            folder = (runs or out) / config.name / f"{model}_c{width}_lr{lr:g}"
            found.append(_run(config.run(model, width, lr), folder, chosen))
            say(f"{model} C={width} lr {lr:g}: {found[-1]['accuracy']}")
        found.sort(key=_accuracy, reverse=True)
        best = found.pop(0)
        value = best.pop("accuracy")
        best |= sizes[width, model] | {"others": found or None}
        result.add(value, **place, seed=config.task.seed, **best)
    return result


def _run(config: TrainConfig, folder: Path, device: torch.device) -> dict[str, Any]:
    """Train, or read a finished run; return its accuracy, or "diverged", and its details.

    The seconds are those of the steps, without evaluations.
    """
    try:
        accuracy: float | str | None = train(config, folder, quiet=True, device=device).val_accuracy
    except DivergenceError:
        accuracy = "diverged"
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    steps = [row for row in rows if "loss" in row]
    tests = [row for row in rows if "val_accuracy" in row]
    tokens = config.batch_size * config.seq_len
    return {
        "accuracy": accuracy,
        "lr": config.optim.lr,
        "trained_steps": len(steps),
        "seconds": sum(tokens / row["tokens_per_second"] for row in steps),
        "steps": {
            "train": [[row["step"], row["loss"]] for row in steps[:: max(1, len(steps) // 100)]],
            "accuracy": [[row["step"], row["val_accuracy"]] for row in tests],
        },
    }


def _accuracy(run: dict[str, Any]) -> float:
    """Return a run's accuracy, below all others if the training diverged."""
    return -1.0 if isinstance(run["accuracy"], str) else run["accuracy"]


def _sizes(config: SweepConfig, width: int, model: str) -> dict[str, int]:
    """Return a model's weights and bytes of state; refuse its width before hours of training."""
    try:
        with torch.device("meta"):
            built = config.run(model, width, config.learning_rates[0]).model.build()
    except ValueError as error:
        raise UserError(f"{model} cannot have width {width}: {error}") from error
    state_bytes = built.state_bytes(config.task.seq_len)
    return {"parameters": built.num_parameters(), "state_bytes": state_bytes}
