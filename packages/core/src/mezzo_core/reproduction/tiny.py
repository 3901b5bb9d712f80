"""The tiny trainings of a `reproduce` run: recipes with a small budget."""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mezzo_core.device import choose_device
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.reproduction.claims import failure
from mezzo_core.reproduction.measurement import Entry, How, Measurement
from mezzo_core.reproduction.runner import side_by_side
from mezzo_core.reproduction.training import loss_by_length, measure_run
from mezzo_core.train.config import TrainConfig

MAX_PROCESSES = 6  # each takes about a gigabyte for torch, a model and its activations
SIZES = ("steps", "batch_size", "seq_len", "eval_batches")
WINDOWS = 4  # of the longest test length: all lengths read this text
PERPLEXITY = "Val. PPL"
NAME = "training the tiny models"


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


class Trainings:
    """The trainings of one reproduction, which run once, when the first claim asks for them.

    The models are recipes by the paper's names. All runs read the same tokens in the same order,
    and are evaluated on the same text. They are in `runs/RECIPE`; older runs there are replaced.
    `watch` is called with a name, and how many of how many trainings are done.
    """

    def __init__(
        self,
        models: Mapping[str, TrainConfig],
        budget: Budget,
        runs: Path,
        watch: Callable[[str, int, int], None],
    ) -> None:
        self.budget, self._runs, self._watch = budget, runs, watch
        self._found: dict[str, dict[str, Any] | Exception] = {}
        sizes: dict[str, Any] = {key: getattr(budget, key) for key in SIZES}
        last: dict[str, Any] = {"eval_every": budget.steps, "checkpoint_every": budget.steps}
        self._configs = {
            model: replace(recipe, **sizes, **last, micro_batch_size=None)
            for model, recipe in models.items()
        }

    @property
    def trained(self) -> tuple[str, ...]:
        """The models whose training has succeeded; none before the first call."""
        return tuple(m for m, found in self._found.items() if not isinstance(found, Exception))

    def results(self, models: Sequence[str] = ()) -> dict[str, dict[str, Any]]:
        """Return what came of the trainings of these models (none: of all).

        The first call trains. A training that failed raises its error here, at each call, and is
        not started again.
        """
        if not self._found:
            try:
                self._train()
            except Exception as error:
                self._found = dict.fromkeys(self._configs, error)
        wanted = {model: self._found[model] for model in self._configs if model in models}
        results = {}
        for model, found in (wanted or self._found).items():
            if isinstance(found, Exception):
                raise found
            results[model] = found
        return results

    def measurement(self, models: Sequence[str], by_length: bool) -> Measurement:
        """Return the perplexity or the loss by test length of some models, or of all."""
        entries = []
        for model, found in self.results(models).items():
            values = found["loss_at"] if by_length else {PERPLEXITY: found["perplexity"]}
            details = {name: found[name] for name in ("parameters", "steps")}
            seed = self._configs[model].seed
            entries += [Entry(model, c, value, "", seed, details) for c, value in values.items()]
        words = "; loss over the same text in windows of T" if by_length else ""
        return Measurement(
            tuple(entries),
            tuple(f"T={T}" for T in self.budget.test_lengths) if by_length else (PERPLEXITY,),
            self.setting + words,
            How.SCALED_DOWN,
            "nats a byte" if by_length else "perplexity a byte",
            kind="training",
            title="The tiny trainings",
        )

    @property
    def setting(self) -> str:
        """The setting that all trainings share, in words."""
        found = self.results(self.trained)
        parameters = next(iter(found.values()))["parameters"]
        budget = self.budget
        tokens = budget.steps * budget.batch_size * budget.seq_len
        return (
            f"models of {parameters / 1e6:.1f}M weights, {budget.steps} steps of "
            f"{budget.batch_size} sequences of {budget.seq_len} bytes ({tokens:,} in all) of "
            "three Austen novels"
        )

    def _train(self) -> None:
        """Train each model once.

        Small models gain little from a second thread, so with `budget.parallel` each core trains a
        model of its own, with one thread each. On one GPU several would slow each other down.
        """
        processes = 1
        if self.budget.parallel and not torch.cuda.is_available():
            mine = hasattr(os, "sched_getaffinity")  # the cores that this process may use
            cores = len(os.sched_getaffinity(0)) if mine else os.cpu_count() or 1
            processes = min(cores, MAX_PROCESSES)
        lengths = {f"T={T}": T for T in self.budget.test_lengths}
        calls = {
            model: partial(train_tiny, config, self._runs / config.name, lengths)
            for model, config in self._configs.items()
        }
        self._watch(NAME, 0, len(calls))
        done = dict[str, dict[str, Any] | Exception]()
        for model, found in side_by_side(calls, self._runs, torch.device("cpu"), processes):
            done[model] = found
            self._watch(NAME, len(done), len(calls))
        self._found = {model: done[model] for model in calls}


def train_tiny(
    config: TrainConfig, run: Path, lengths: Mapping[str, int], folder: Path, device: torch.device
) -> dict[str, Any] | Exception:
    """Train in the folder `run`, then evaluate at each test length T; see `side_by_side`.

    Returns:
        What `measure_run` does and `loss_at`, in nats a token by "T=..."; or the error of a
        training that fails.

    Raises:
        UserError: see `failure`; it ends the other trainings too.
    """
    try:
        found = measure_run(config, run, choose_device(None, None))
        model, _, _ = load_model(run / "model", device=torch.device("cpu"))
        losses = loss_by_length(model, config, lengths=lengths, windows=WINDOWS)
        return found | {"loss_at": losses}
    except Exception as error:
        failure(error)
        return error
