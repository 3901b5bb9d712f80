"""Tiny trainings of recipes on the same tokens, with the same seeds and budget."""

import json
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing import get_context
from pathlib import Path

import torch

from mezzo_core.eval.evaluate import evaluate
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.loop import train

MAX_PROCESSES = 6  # each takes about a gigabyte for torch, a model and its activations
WINDOWS = 4


@dataclass(frozen=True)
class Budget:
    """The size of each training of a reproduction.

    Attributes:
        seeds: seeds of the weights; every model is trained once with each.
        steps, batch_size, seq_len: as in `TrainConfig`.
        eval_batches: validation batches of an evaluation; None reads the whole validation part.
        test_lengths: further lengths T at which the trained models are evaluated.
        parallel: train one model on each core, rather than one model on all cores.
    """

    seeds: tuple[int, ...]
    steps: int
    batch_size: int
    seq_len: int
    eval_batches: int | None = None
    test_lengths: tuple[int, ...] = ()
    parallel: bool = True


CPU = Budget(seeds=(0, 1, 2), steps=300, batch_size=2, seq_len=512)
"""Takes a minute or two for each model and seed on one core."""
SMOKE = Budget(seeds=(0,), steps=3, batch_size=1, seq_len=64, eval_batches=1, parallel=False)
"""Takes seconds, and only shows that everything runs."""


@dataclass(frozen=True)
class Job:
    """One training: a model, by the paper's name, and a seed."""

    model: str
    config: TrainConfig
    out: Path
    test_lengths: tuple[int, ...]


@dataclass(frozen=True)
class TrainedRun:
    """The result of one training; `loss_at` is the validation loss by test length."""

    model: str
    seed: int
    parameters: int
    seq_len: int
    perplexity: float
    tokens_per_second: float
    curve: tuple[tuple[float, float], ...]
    loss_at: dict[int, float]
    out: Path


def jobs(models: Mapping[str, TrainConfig], budget: Budget, out: Path) -> list[Job]:
    """List the trainings of a budget: all models with the first seed, then with the next ones.

    The run with the first seed is kept in `out/RECIPE`, the others in `out/RECIPE-seedN`.
    """
    return [
        Job(
            model=model,
            config=configure(config, budget, seed),
            out=out / (config.name if seed == budget.seeds[0] else f"{config.name}-seed{seed}"),
            test_lengths=budget.test_lengths,
        )
        for seed in budget.seeds
        for model, config in models.items()
    ]


def configure(config: TrainConfig, budget: Budget, seed: int) -> TrainConfig:
    """Return a recipe with the budget and the seed of a reproduction.

    The data keeps its own seed. So all runs read the same tokens in the same order, and are
    evaluated on the same text.
    """
    return replace(
        config,
        steps=budget.steps,
        batch_size=budget.batch_size,
        seq_len=budget.seq_len,
        micro_batch_size=None,
        seed=seed,
        eval_every=budget.steps,
        eval_batches=budget.eval_batches,
        checkpoint_every=budget.steps,
        keep_checkpoints=1,
    )


def train_all(
    models: Mapping[str, TrainConfig],
    budget: Budget,
    out: Path,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[TrainedRun]:
    """Train every job, and return the runs in the order of `jobs`.

    Runs of an earlier reproduction in `out` are replaced. Small models gain little from a second
    thread, so with `budget.parallel` each core trains a model of its own, with one thread each.

    Args:
        models: recipes by the paper's names.
        budget: budget of each training.
        out: the folder of all runs.
        on_progress: called with the steps done so far and the steps of all trainings.
    """
    work = jobs(models, budget, out)
    for job in work:
        shutil.rmtree(job.out, ignore_errors=True)
    total = len(work) * budget.steps
    report = on_progress or (lambda done, total: None)
    # Several processes slow each other down on one GPU, so there one training runs at a time.
    if torch.cuda.is_available() or not budget.parallel:
        runs = []
        for job in work:
            runs.append(run_job(job))
            report(len(runs) * budget.steps, total)
        return runs
    workers = min(available_cores(), MAX_PROCESSES, len(work))
    with ProcessPoolExecutor(workers, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(run_job, job) for job in work]
        while wait(futures, timeout=0.5, return_when=FIRST_EXCEPTION).not_done:
            if any(future.done() and future.exception() for future in futures):
                pool.shutdown(wait=False, cancel_futures=True)
                break
            report(sum(len(read_curve(job.out)) for job in work), total)
        return [future.result() for future in futures]


def run_job(job: Job) -> TrainedRun:
    """Train, then evaluate at each test length."""
    result = train(job.config, job.out, resume=False, quiet=True)
    if result.val_perplexity is None:
        raise ValueError(f"{job.config.name}: the training was not evaluated")
    return TrainedRun(
        model=job.model,
        seed=job.config.seed,
        parameters=count_parameters(job.config),
        seq_len=job.config.seq_len,
        perplexity=result.val_perplexity,
        tokens_per_second=result.tokens_per_second,
        curve=read_curve(job.out),
        loss_at=losses_by_length(job),
        out=job.out,
    )


def losses_by_length(job: Job) -> dict[int, float]:
    """Return the validation loss in nats per token for each test length T, in windows of T.

    All lengths read the same text: the first WINDOWS windows of the longest length.
    """
    if not job.test_lengths:
        return {}
    model, _, _ = load_model(job.out / "model", device=torch.device("cpu"))
    longest = max(job.test_lengths)
    losses = {}
    for length in job.test_lengths:
        text = job.config.data.build(length, None)
        batches = islice(text.validation_batches(1), WINDOWS * longest // length)
        losses[length] = evaluate(model, batches).loss
    return losses


def count_parameters(config: TrainConfig) -> int:
    """Return the number of weights of a recipe's model, counting shared ones once."""
    with torch.device("meta"):
        return config.model.build().num_parameters()


def read_curve(out: Path) -> tuple[tuple[float, float], ...]:
    """Return (step, training loss) of each step in a run's log; empty if there is no log yet."""
    log = out / "log.jsonl"
    if not log.exists():
        return ()
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    # A run in progress may be writing the last line.
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return tuple((row["step"], row["loss"]) for row in rows if "loss" in row)


def available_cores() -> int:
    """Return how many cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
