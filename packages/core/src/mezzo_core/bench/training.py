"""Trains models and measures how well and how fast: each model once with each seed."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mezzo_core.bench.jobs import side_by_side
from mezzo_core.bench.result import Result
from mezzo_core.bench.timing import OOM, start_afresh
from mezzo_core.data import DataConfig
from mezzo_core.data.find import find_files
from mezzo_core.data.hub import HUB_PREFIX
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.errors import UserError
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.stack import Stack
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.log import read_rows
from mezzo_core.train.loop import DivergenceError, train
from mezzo_core.train.meter import StepRow

DIVERGED = "diverged"  # stands for the result of a training whose loss exploded
WARMUP = 10
"""Steps left out of the speed: on a GPU, those before the training loop first reads the clock."""
POINTS = 100  # at most, of a stored curve
SWEPT = 0
"""The seed with which learning rates are compared."""
NO_SPEED = dict.fromkeys(("tokens_per_second", "seconds_to_first_step"))
"""Takes the place of the speeds of trainings that ran at the same time."""


def train_models(
    result: Result,
    configs: Mapping[str, TrainConfig],
    seeds: Sequence[int],
    folder: Path,
    device: torch.device,
    jobs: int = 1,
) -> None:
    """Train each model with each seed, the first seed first, and add it to the first column.

    Args:
        result: what it has already is left out.
        configs: the runs by the models' names; their seed is replaced.
        seeds: of the initial weights; the data's order has its own.
        folder: scratch, see `measure_run`.
        device: where to train.
        jobs: trainings at the same time, see `side_by_side`.
    """
    column = result.header.columns[0]
    runs = [(m, column, replace(c, seed=seed)) for seed in seeds for m, c in configs.items()]
    train_runs(result, runs, folder, device, jobs)


def train_swept(
    result: Result,
    configs: Mapping[str, TrainConfig],
    rates: Mapping[str, float],
    seeds: Sequence[int],
    folder: Path,
    device: torch.device,
    jobs: int = 1,
) -> None:
    """Train each model at several learning rates with seed SWEPT, with the other seeds at its best.

    So that no model loses for a rate that does not suit it: the sweep begins with the three rates
    in the middle, and goes on where a model's best has an untried neighbour.
    `mezzo_core.papers.claims.swept` reads such a result.

    Args:
        result: what it has already is left out.
        configs: the runs by the models' names; their seed and rate are replaced.
        rates: the learning rates in order, by the names of the result's columns.
        seeds: of the initial weights.
        folder: scratch, see `measure_run`.
        device: where to train.
        jobs: trainings at the same time, see `side_by_side`.
    """
    columns = list(rates)

    def run(model: str, column: str, seed: int) -> tuple[str, str, TrainConfig]:
        return model, column, replace(at_rate(configs[model], rates[column]), seed=seed)

    middle = columns[max(0, len(columns) - 3) // 2 :][:3]
    wanted = [run(model, column, SWEPT) for column in middle for model in configs]
    best: dict[str, str | None] = {}
    while wanted:
        train_runs(result, wanted, folder, device, jobs)
        best = {model: result.best_column(model, seed=SWEPT) for model in configs}
        wanted = [
            run(model, column, SWEPT)
            for model, found in best.items()
            if found is not None
            for column in _around(columns, found)
            if not result.has(model, column, seed=SWEPT)
        ]
    others = [
        run(model, column, seed)
        for seed in seeds
        for model, column in best.items()
        if column is not None and seed != SWEPT
    ]
    train_runs(result, others, folder, device, jobs)


def _around(columns: Sequence[str], column: str) -> Sequence[str]:
    """Return a column and its neighbours."""
    place = columns.index(column)
    return columns[max(0, place - 1) : place + 2]


def at_rate(config: TrainConfig, lr: float) -> TrainConfig:
    """Return a run at another learning rate; the one at its end keeps its share of the first."""
    optim = config.optim
    return replace(config, optim=replace(optim, lr=lr, min_lr=optim.min_lr / optim.lr * lr))


def train_runs(
    result: Result,
    runs: Iterable[tuple[str, str, TrainConfig]],
    folder: Path,
    device: torch.device,
    jobs: int = 1,
) -> None:
    """Train runs, told by model and column, and add each, unless the result has it.

    Its value is the validation perplexity; OOM or DIVERGED stand for a training that does not fit
    into the GPU, or whose loss exploded. Trainings at the same time have no speed.
    """
    calls = {
        (model, column, config.seed): partial(outcome, config)
        for model, column, config in runs
        if not result.has(model, column, seed=config.seed)
    }
    for (model, column, seed), found in side_by_side(calls, folder, device, jobs):
        if jobs > 1:
            found |= NO_SPEED
        value = found.pop("perplexity")
        result.add(value, model=model, column=column, seed=seed, **found)


def outcome(config: TrainConfig, folder: Path, device: torch.device) -> dict[str, Any]:
    """Do as `measure_run`, but let a training that fails have OOM or DIVERGED as perplexity."""
    try:
        return measure_run(config, folder, device)
    except torch.OutOfMemoryError:
        return {"perplexity": OOM}
    except DivergenceError:
        return {"perplexity": DIVERGED}


def measure_run(
    config: TrainConfig, folder: Path, device: torch.device, *, resume: bool = False
) -> dict[str, Any]:
    """Train a model and return what came of it, read from the run's log.

    Args:
        config: of the run. If it starts from another model (`init_from`), that is evaluated too.
        folder: of the run. All runs of an experiment may take the same folder in turn.
        device: where to train.
        resume: continue the run in the folder, or only read it if it is done; False removes it.

    Returns:
        perplexity, accuracy and (of a task) exact_match on the validation part, parameters,
        tokens_per_second (median after the warm-up), seconds_to_first_step, peak_gb (None on a
        CPU, or if the run was only read), and steps: the curves "train" and "val", lists of
        [step, loss] with at most POINTS points.

    Raises:
        DivergenceError: if the loss explodes.
        UserError: if the log of a run that is only read is gone, damaged or cut off.
        torch.OutOfMemoryError: if the run does not fit into the GPU.
    """
    start = [] if config.init_from is None else [[0, _loss_before(config, device)]]
    start_afresh()
    taken: list[StepRow] = []
    done = train(config, folder, resume=resume, quiet=True, device=device, on_step=taken.append)
    peak = torch.cuda.max_memory_allocated() / 1e9 if taken and device.type == "cuda" else None
    log = read_rows(folder / "log.jsonl", done.steps)
    steps = [row for row in log if "loss" in row]
    tests = [row for row in log if "val_loss" in row]
    measures = ["val_accuracy"]
    if not isinstance(config.data, DataConfig):  # no model predicts whole rows of text
        measures.append("val_exact_match")
    last = [rows[-1] for rows in (steps, tests) if rows and rows[-1]["step"] == done.steps]
    if len(last) < 2 or any(last[1].get(measure) is None for measure in measures):
        raise UserError(
            f"{folder / 'log.jsonl'} lacks the last step of its run or what was measured after it: "
            f"remove {folder}, and the run is made again"
        )
    speeds = [row["tokens_per_second"] for row in steps]
    speed, first = steady_and_first(speeds, config.batch_size * config.seq_len)
    with torch.device("meta"):
        parameters = config.model.build().num_parameters()
    return {
        "perplexity": tests[-1]["val_perplexity"],
        "accuracy": tests[-1]["val_accuracy"],
        "exact_match": tests[-1]["val_exact_match"] if len(measures) > 1 else None,
        "parameters": parameters,
        "tokens_per_second": round(speed),
        "seconds_to_first_step": first,
        "peak_gb": peak,
        "steps": {
            "train": _thinned([[row["step"], row["loss"]] for row in steps]),
            "val": _thinned(start + [[row["step"], row["val_loss"]] for row in tests]),
        },
    }


def in_words(config: TrainConfig, device: torch.device) -> str:
    """Describe a run: the model's width and depth, and its conditions."""
    with torch.device("meta"):
        stack = config.model.build().stack
    layers = f", {len(stack.blocks)} layers" if isinstance(stack, Stack) else ""
    return f"C {config.model.d_model}{layers}, {conditions(config, device)}"


def conditions(config: TrainConfig, device: torch.device) -> str:
    """Describe the conditions of a run: tokens, learning rate and precision."""
    data, optim = config.data, config.optim
    assert isinstance(data, DataConfig)
    tokens = config.steps * config.batch_size * config.seq_len
    return (
        f"T {config.seq_len}, {config.steps} steps of {config.batch_size} sequences "
        f"({tokens:,} tokens of {corpus_name(data.source)}, "
        f"tokenizer {Path(data.tokenizer).name}), lr {optim.lr:g}, warm-up "
        f"{optim.warmup_fraction:.0%} of the steps, {'bf16' if device.type == 'cuda' else 'fp32'}, "
        f"torch.compile {'on' if config.compile else 'off'}"
    )


def corpus_name(source: str) -> str:
    """Return the names of a corpus's files, or its own where it has none."""
    if source == "embedded" or source.startswith(HUB_PREFIX):
        return source
    return ", ".join(path.name for path in find_files(source))


def steady_and_first(speeds: Sequence[float], tokens_per_step: int) -> tuple[float, float]:
    """Return the tokens a second after the warm-up, and the seconds until the first step ended.

    The loop reads a GPU's clock only every few steps. So the time of the first step (compiling,
    first allocations) is that of the steps of the warm-up, less all but one at steady speed. Of
    WARMUP steps or fewer, only the last is steady.
    """
    warmup = min(WARMUP, len(speeds) - 1)
    steady = statistics.median(speeds[warmup:])
    warming = sum(tokens_per_step / speed for speed in speeds[:warmup])
    return steady, warming - (warmup - 1) * tokens_per_step / steady


def _loss_before(config: TrainConfig, device: torch.device) -> float:
    """Return the validation loss of the model from which a run starts."""
    assert config.init_from is not None
    model, _, _ = load_model(config.init_from, device=device)
    data = config.data.build(config.seq_len, token_store())
    batches = islice(data.validation_batches(config.batch_size), config.eval_batches)
    return evaluate(model, batches, precision=config.precision).loss


def _thinned(points: list[list[float]]) -> list[list[float]]:
    """Keep at most POINTS points at equal distances, the last one among them."""
    return points[::-1][:: math.ceil(len(points) / POINTS) or 1][::-1]
