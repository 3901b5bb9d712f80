"""The tiny trainings of a `reproduce` run: recipes with a small budget."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import torch

from mezzo_core.device import choose_device
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction.claims import PERPLEXITY, TRAININGS
from mezzo_core.reproduction.measurement import Measurement, read_result
from mezzo_core.reproduction.runner import fill
from mezzo_core.reproduction.training import loss_by_length, of_model, training
from mezzo_core.train.config import TrainConfig

MAX_PROCESSES = 6  # each takes about a gigabyte for torch, a model and its activations
SIZES = ("steps", "batch_size", "seq_len", "eval_batches")
WINDOWS = 4  # of the longest test length: all lengths read this text


@dataclass(frozen=True)
class Budget:
    """The size of each training of a reproduction."""

    steps: int  # and batch_size and seq_len: as in `TrainConfig`
    batch_size: int
    seq_len: int
    eval_batches: int | None = None  # of an evaluation; None reads the whole validation part
    test_lengths: tuple[int, ...] = ()  # further T at which the trained models are evaluated
    parallel: bool = True  # train one model on each core, rather than one model on all cores


CPU = Budget(steps=160, batch_size=2, seq_len=512, eval_batches=32)
"""Takes about half a minute for each model on one core."""
SMOKE = Budget(steps=3, batch_size=1, seq_len=64, eval_batches=1, parallel=False)
"""Takes seconds, and only shows that everything runs."""


def train_tiny(
    models: Mapping[str, TrainConfig],
    budget: Budget,
    folder: Path,
    watch: Callable[[str, int, int], None],
) -> Measurement:
    """Train models once, and test them at each length; an error of one leaves the others alone.

    All runs read the same tokens in the same order, and are evaluated on the same text. The folder
    gets the result, and in `runs/RECIPE` the runs, whose models stay. `watch` is called with what
    is being done, how many trainings have ended, and of how many.
    """
    sizes: dict[str, Any] = {key: getattr(budget, key) for key in SIZES}
    last: dict[str, Any] = {"eval_every": budget.steps, "checkpoint_every": budget.steps}
    configs = {
        model: replace(recipe, **sizes, **last, micro_batch_size=None)
        for model, recipe in models.items()
    }
    lengths = {f"T={T}": T for T in budget.test_lengths}
    header = {
        "kind": "training",
        "title": "The tiny trainings",
        "setting": _setting(next(iter(configs.values())), budget),
        "unit": "",
    }
    columns = (PERPLEXITY, *lengths)
    test = partial(of_model, partial(loss_by_length, lengths=lengths, windows=WINDOWS))
    jobs = []
    for model, config in configs.items():
        job = training(model, columns, config, test, kept=folder / "runs" / config.name)
        jobs.append(replace(job, is_excused=True))
    done, device = count(), choose_device(None, None)

    def say(line: str = "") -> None:
        watch("training the tiny models", next(done), len(jobs))

    say()
    path = folder / "measured" / f"{TRAININGS}.json"
    processes = _processes() if budget.parallel else 1
    fill(path, header, jobs, folder, device, processes=processes, say=say)
    return replace(read_result(path), source="")


def _setting(config: TrainConfig, budget: Budget) -> str:
    tokens = budget.steps * budget.batch_size * budget.seq_len
    words = (
        f"models of {on_meta(config.model).num_parameters() / 1e6:.1f}M weights, {budget.steps} "
        f"steps of {budget.batch_size} sequences of {budget.seq_len} bytes ({tokens:,} in all) of "
        "three Austen novels; perplexity a byte"
    )
    return f"{words}; at T the nats a byte of the same text" if budget.test_lengths else words


def _processes() -> int:
    """Return how many models train at the same time.

    Small models gain little from a second thread, so each core trains one. On one GPU several would
    slow each other down.
    """
    if torch.cuda.is_available():
        return 1
    mine = hasattr(os, "sched_getaffinity")  # the cores that this process may use
    cores = len(os.sched_getaffinity(0)) if mine else os.cpu_count() or 1
    return min(cores, MAX_PROCESSES)
