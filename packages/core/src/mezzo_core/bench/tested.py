"""Trainings whose models are tested in several ways: a run gives a value for each column."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from mezzo_core.bench.jobs import side_by_side
from mezzo_core.bench.result import Result
from mezzo_core.bench.training import NO_SPEED, outcome
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.lm import LM
from mezzo_core.train.config import TrainConfig

Test = Callable[[LM, TrainConfig], Mapping[str, float]]
"""Takes a trained model and its run, and returns a value for each column; can be pickled."""


def train_and_test(
    result: Result,
    configs: Mapping[str, TrainConfig],
    seeds: Sequence[int],
    test: Test,
    folder: Path,
    device: torch.device,
    jobs: int = 1,
) -> None:
    """Train each model with each seed, the first seed first, and add what a test finds.

    A training that fails has its word, OOM or DIVERGED, in every column. The details of a run stand
    in its first column. The other arguments are those of `train_models`.
    """
    columns = result.header.columns
    calls = {
        (model, seed): partial(_tested, replace(config, seed=seed), test, columns)
        for seed in seeds
        for model, config in configs.items()
        if not all(result.has(model, column, seed=seed) for column in columns)
    }
    for (model, seed), (found, values) in side_by_side(calls, folder, device, jobs):
        if jobs > 1:
            found |= NO_SPEED
        for column in columns:
            details = found if column == columns[0] else {}
            if not result.has(model, column, seed=seed):
                result.add(values[column], model=model, column=column, seed=seed, **details)


def _tested(
    config: TrainConfig, test: Test, columns: Sequence[str], folder: Path, device: torch.device
) -> tuple[dict[str, Any], Mapping[str, float | str]]:
    """Train and test; return what came of the run, and the values."""
    found = outcome(config, folder, device)
    value = found.pop("perplexity")
    if isinstance(value, str):
        return found, dict.fromkeys(columns, value)
    model, _, _ = load_model(folder / "model", device=device)
    return found, test(model, config)


def loss_by_length(
    model: LM, config: TrainConfig, *, lengths: Mapping[str, int], windows: int | None = None
) -> dict[str, float]:
    """Return the loss on the validation part in windows of each length T, in nats a token.

    Args:
        model: the model.
        config: its run, for the text.
        lengths: by the names of columns.
        windows: how many of the longest length are read; None reads all. All lengths have the same
            targets, if they divide the longest.
    """
    longest, found = max(lengths.values(), default=0), {}
    for column, T in lengths.items():
        text = config.data.build(T, token_store())
        batches = islice(text.validation_batches(longest // T), windows)
        found[column] = evaluate(model, batches, precision=config.precision).loss
    return found
