"""Models, widths and learning rates: every run of a sweep, one after another."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from mezzo_core.device import choose_device
from mezzo_core.errors import UserError

from mezzo_gsa.mqar.config import SweepConfig
from mezzo_gsa.mqar.model import build_model
from mezzo_gsa.mqar.result import SweepResult
from mezzo_gsa.mqar.training import RecallRun, draw_rows, train_run


def sweep(
    config: SweepConfig,
    out: Path,
    say: Callable[[str], None],
    *,
    device: str | torch.device | None = None,
) -> SweepResult:
    """Train everything that `config` asks for, narrow models first.

    After each run the result in `out` and its figure are written again. Runs that are in the file
    are not run again: a sweep that was killed goes on, and one may be widened.

    Args:
        config: what to run.
        out: the result's folder, made if needed.
        say: called with a line of text as the sweep goes on.
        device: "cpu" or "cuda"; None takes a GPU if there is one.

    Raises:
        UserError: if a model cannot have a width, `out` holds a sweep with another training or of
            another machine or cannot be written, or there is no such device.
    """
    _check_widths(config)
    chosen = choose_device(device, None)
    result = SweepResult(config.training, out, chosen)
    finished = {(run.d_model, run.model, run.lr) for run in result.runs}
    wanted = product(sorted(config.widths), config.models, config.learning_rates)
    todo = [each for each in wanted if each not in finished]
    say(f"{len(todo)} runs to do on {chosen}; {len(finished)} are in {result.path}")
    if not todo:
        return result
    train, test = draw_rows(config.training, chosen)
    for width, model, lr in todo:
        solved = any(run.stopped == "solved" for run in result.find(model, width))
        if config.skip_solved and solved:
            say(f"{model} C={width} lr {lr:g}: left out, another learning rate solved the task")
            continue
        run = train_run(model, width, lr, config.training, train, test)
        result.add(run)
        say(describe(run))
    return result


def describe(run: RecallRun) -> str:
    """Say in a line what a run came to."""
    return (
        f"{run.model} C={run.d_model} lr {run.lr:g}: accuracy {run.accuracy:.4f}, "
        f"state {run.state_bytes:,} bytes, {len(run.curve)} epochs ({run.stopped}), "
        f"{run.seconds:.0f} s"
    )


def _check_widths(config: SweepConfig) -> None:
    """Refuse a width before hours of training, not after."""
    task = config.training.task
    for model in config.models:
        for width in config.widths:
            try:
                with torch.device("meta"):
                    build_model(
                        model,
                        width,
                        vocab_size=task.vocab_size,
                        seq_len=task.seq_len,
                        num_layers=config.training.num_layers,
                        conv_width=config.training.conv_width,
                    )
            except ValueError as error:
                raise UserError(f"{model} cannot have width {width}: {error}") from error
