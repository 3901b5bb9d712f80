"""The best of several trainings of one model, which differ in settings of their optimizer."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from mezzo_core.bench.result import Say
from mezzo_core.bench.training import DIVERGED, measure_run
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import DivergenceError


def best_run(
    name: str,
    configs: Iterable[TrainConfig],
    folder: Path,
    device: torch.device,
    say: Say,
    *,
    swept: Sequence[str],
    by: Sequence[str] = ("accuracy",),
    enough: float | None = None,
) -> dict[str, Any]:
    """Train one run after another and return what came of the best.

    A run has a folder of its own, so that a sweep which was killed goes on: a run resumes, and one
    that is finished is only read.

    Args:
        name: of what is trained, for `say`.
        configs: the runs.
        folder: what the runs' folders begin with; their settings follow, as in "gsa_lr0.001".
        device: where to train.
        say: called with a line about each run.
        swept: the fields of `OptimConfig` in which the runs differ.
        by: the measures that decide, from `measure_run`, higher ones being better; the second one
            decides between runs that are equal by the first.
        enough: no further runs are made after one that is above this by the first measure.

    Returns:
        The settings of the best run and what `measure_run` gives, but for the perplexity; "others"
        has the same of the other runs, the best first (None if there are none). The measures of a
        run whose loss exploded are DIVERGED.
    """
    found: list[dict[str, Any]] = []
    told = ""
    for config in configs:
        if enough is not None and any(_scores(run, by)[0] > enough for run in found):
            say(f"{name}: nothing else is tried, as {told} solved it")
            break
        settings = {field: getattr(config.optim, field) for field in swept}
        told = " ".join(f"{field} {value:g}" for field, value in settings.items())
        words = [folder.name, *(f"{field}{value:g}" for field, value in settings.items())]
        try:
            measured = measure_run(config, folder.with_name("_".join(words)), device, resume=True)
            del measured["perplexity"]
        except DivergenceError:
            measured = dict.fromkeys(by, DIVERGED)
        found.append(settings | measured)
        say(f"{name} {told}: {', '.join(str(measured[measure]) for measure in by)}")
    best, *others = sorted(found, key=lambda run: _scores(run, by), reverse=True)
    return best | {"others": others or None}


def _scores(run: dict[str, Any], by: Sequence[str]) -> list[float]:
    """Return a run's measures, below all others if the training diverged."""
    return [-1.0 if run[measure] == DIVERGED else run[measure] for measure in by]
