"""The best of several trainings of one model, which differ in settings of their optimizer."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mezzo_core.bench.jobs import side_by_side
from mezzo_core.bench.result import Say
from mezzo_core.bench.script import say as write
from mezzo_core.bench.training import DIVERGED, NO_SPEED, measure_run
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import DivergenceError


class Sweep(NamedTuple):
    """The trainings of one model, of which the best is wanted."""

    name: str
    """Of what is trained, for `say`."""
    configs: Sequence[TrainConfig]
    """The runs, in the order in which they are made."""
    folder: Path
    """What the runs' folders begin with; their settings follow, as in "gsa_lr0.001"."""
    enough: float | None = None
    """No further runs are made after one that is above this by the first measure."""


def best_runs(
    sweeps: Sequence[Sweep],
    device: torch.device,
    say: Say,
    jobs: int = 1,
    *,
    swept: Sequence[str],
    by: Sequence[str] = ("accuracy",),
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the place of each sweep and what `best_run` gives, in the order in which they end.

    Args:
        sweeps: one of them makes one run after another.
        device: where to train.
        say: called with a line about each run; several processes print theirs.
        jobs: sweeps at the same time, see `side_by_side`. Their runs have no speed then.
        swept: as the following, see `best_run`.
        by: as said.
    """
    told = say if jobs == 1 else write  # which another process can have
    calls = {
        (i, sweep.name): partial(_best_run, sweep, say=told, swept=swept, by=by)
        for i, sweep in enumerate(sweeps)
    }
    for (i, _), best in side_by_side(calls, Path(), device, jobs):  # runs have folders of their own
        for run in (best, *(best["others"] or ())) if jobs > 1 else ():
            run |= NO_SPEED
        yield i, best


def _best_run(sweep: Sweep, scratch: Path, device: torch.device, **options: Any) -> dict[str, Any]:
    return best_run(sweep, device, **options)


def best_run(
    sweep: Sweep,
    device: torch.device,
    say: Say,
    *,
    swept: Sequence[str],
    by: Sequence[str] = ("accuracy",),
) -> dict[str, Any]:
    """Train one run after another and return what came of the best.

    A run has a folder of its own, so that a sweep which was killed goes on: a run resumes, and one
    that is finished is only read.

    Args:
        sweep: the runs.
        device: where to train.
        say: called with a line about each run.
        swept: the fields of `OptimConfig` in which the runs differ.
        by: the measures that decide, from `measure_run`, higher ones being better; the second one
            decides between runs that are equal by the first.

    Returns:
        The settings of the best run and what `measure_run` gives, but for the perplexity; "others"
        has the same of the other runs, the best first (None if there are none). The measures of a
        run whose loss exploded are DIVERGED.
    """
    name, configs, folder, enough = sweep
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
