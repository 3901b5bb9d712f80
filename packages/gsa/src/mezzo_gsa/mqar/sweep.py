"""Models, widths and learning rates: every run of a sweep, and the file that they end up in."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import commit, environment
from mezzo_core.config_json import to_json
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.papers.runs import write_result
from mezzo_core.train.loop import DivergenceError, train

from mezzo_gsa.mqar.config import SOLVED, SweepConfig

MAY_CHANGE = ("models", "widths", "learning_rates", "skip_solved", "compile")
"""Fields of a sweep that change no run: a sweep that goes on may have others."""


@dataclass(frozen=True)
class RecallRun:
    """A finished training; the log.jsonl in its folder has the accuracy after every epoch."""

    model: str
    width: int
    lr: float  # that the run began with
    accuracy: float | None  # of the test rows' questions, a share; None if the training diverged
    steps: int | None  # None if the training diverged
    parameters: int
    state_bytes: int  # of one row after all its tokens
    seconds: float  # since the run began or was last resumed
    commit: str | None  # of the code that trained it; None if that is no checkout


def sweep(
    config: SweepConfig,
    out: Path,
    say: Callable[[str], None],
    *,
    device: str | torch.device | None = None,
) -> list[RecallRun]:
    """Train everything that `config` asks for, narrow models first; return what is in the result.

    The result in `out` is written again after each run. A sweep that was killed goes on where it
    was: the result has the finished runs, and an unfinished one resumes from its own folder.

    Args:
        config: what to run.
        out: the folder of the result, and of the runs' folders.
        say: called with a line of text as the sweep goes on.
        device: "cpu" or "cuda"; None takes a GPU if there is one.

    Raises:
        UserError: if a model cannot have a width, `out` holds a sweep that trained in another way
            or cannot be written, or there is no such device.
    """
    sizes = {(model, width): _sizes(config, model, width) for model, width, _ in config.choices()}
    chosen = choose_device(device, None)
    path = result_path(config, out)
    runs = read_runs(config, path, chosen)
    finished = {(run.model, run.width, run.lr) for run in runs}
    for model, width, lr in config.choices():
        name = f"{model} C={width} lr {lr:g}"
        if (model, width, lr) in finished:
            continue
        if config.skip_solved and _is_solved(runs, model, width):
            say(f"{name}: left out, another learning rate solved the task")
            continue
        if config.compile:
            torch.compiler.reset()  # models of other runs would use up its limit of versions
        folder = out / path.stem / f"{model}_c{width}_lr{lr:g}"
        start = time.perf_counter()
        accuracy, steps = None, None
        try:
            done = train(config.run(model, width, lr), folder, quiet=True, device=chosen)
            accuracy, steps = done.val_accuracy, done.steps
            say(f"{name}: accuracy {accuracy:.4f} after {steps} steps")
        except DivergenceError as error:
            say(f"{name}: {error}")
        seconds = time.perf_counter() - start
        runs.append(
            RecallRun(model, width, lr, accuracy, steps, *sizes[model, width], seconds, commit())
        )
        write_runs(config, path, chosen, runs)
    return runs


def best(runs: Sequence[RecallRun]) -> dict[tuple[str, int], RecallRun]:
    """Return the most accurate run of each model and width."""
    ranked = sorted(runs, key=lambda run: -1.0 if run.accuracy is None else run.accuracy)
    return {(run.model, run.width): run for run in ranked}


def result_path(config: SweepConfig, out: Path) -> Path:
    """Return `mqar.json` in `out`, with `_conv` or `_fan_in` for what is not the protocol's."""
    names = ("_conv" if config.conv_width else "", "" if config.init == "zoology" else "_fan_in")
    return out / f"mqar{''.join(names)}.json"


def read_runs(config: SweepConfig, path: Path, device: torch.device) -> list[RecallRun]:
    """Return the runs of a result; none if there is no such file.

    Raises:
        UserError: if it is no result, or its runs trained in another way or on another machine.
    """
    if not path.exists():
        return []
    content, wanted = read_json(path), _shared(config, device)
    try:
        found = dict(content["training"])
        runs = [RecallRun(**run) for run in content["runs"]]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}: no result of an MQAR sweep: {error!r}") from error
    other = [name for name in wanted if found.get(name) != wanted[name]]
    if other:
        raise UserError(f"{path} holds runs with another {', '.join(other)}: choose another folder")
    return runs


def write_runs(
    config: SweepConfig, path: Path, device: torch.device, runs: Sequence[RecallRun]
) -> None:
    """Write the result: an experiment that `mezzo_core.papers` reads, with all runs.

    Raises:
        UserError: if it cannot be written.
    """
    whole, found = SweepConfig(), best(runs)
    done = {(run.model, run.width, run.lr) for run in runs}
    is_whole = _shared(config, device) == _shared(whole, device) and done.issuperset(
        whole.choices()
    )
    widths = sorted({width for _, width in found})
    accuracies = {key: run.accuracy for key, run in found.items() if run.accuracy is not None}
    content = {
        "id": ["gsa.claim.mqar"],
        "same_setting": is_whole,
        "setting": config.in_words(device),
        "columns": [f"C={width}" for width in widths],
        "unit": "accuracy",
        "better": "higher",
        "rows": [
            {
                "model": model,
                "seed": config.task.seed,
                "values": [accuracies.get((model, width), "-") for width in widths],
            }
            for model in dict.fromkeys(run.model for run in runs)
        ],
        **environment(device),
        "training": _shared(config, device),
        "runs": [asdict(run) for run in runs],
    }
    write_result(path, content)


def _shared(config: SweepConfig, device: torch.device) -> dict[str, Any]:
    """Return what all runs of a sweep share: the task, the training and the machine."""
    fields = {**to_json(config.task), **to_json(config), "gpu": environment(device)["gpu"]}
    return {k: value for k, value in fields.items() if k not in ("type", "task", *MAY_CHANGE)}


def _is_solved(runs: Sequence[RecallRun], model: str, width: int) -> bool:
    run = best(runs).get((model, width))
    return run is not None and run.accuracy is not None and run.accuracy > SOLVED


def _sizes(config: SweepConfig, model: str, width: int) -> tuple[int, int]:
    """Return a model's parameters and bytes of state; refuse its width before hours of training."""
    try:
        with torch.device("meta"):
            built = config.run(model, width, config.learning_rates[0]).model.build()
    except ValueError as error:
        raise UserError(f"{model} cannot have width {width}: {error}") from error
    return built.num_parameters(), built.state_bytes(config.task.seq_len)
