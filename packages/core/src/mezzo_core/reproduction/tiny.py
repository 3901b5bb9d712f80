"""The tiny trainings of a `reproduce` run: recipes with a small budget."""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from mezzo_core.data.tokenizers import load_tokenizer
from mezzo_core.device import choose_device
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.nn.generate import generate
from mezzo_core.reproduction.claims import failure
from mezzo_core.reproduction.measurement import Entry, How, Measurement
from mezzo_core.reproduction.report import Sample
from mezzo_core.reproduction.runner import side_by_side
from mezzo_core.reproduction.training import loss_by_length, measure_run
from mezzo_core.train.config import TrainConfig

MAX_PROCESSES = 6  # each takes about a gigabyte for torch, a model and its activations
SIZES = ("steps", "batch_size", "seq_len", "eval_batches")
WINDOWS = 4
PERPLEXITY = "Val. PPL"
PROMPT = "Elizabeth was "


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


@dataclass(frozen=True)
class Training:
    """One training of a model, by the paper's name, into a folder."""

    model: str
    config: TrainConfig
    folder: Path
    test_lengths: tuple[int, ...]

    def run(self) -> dict[str, Any]:
        """Train, then evaluate at each test length T; return the results.

        Their `loss_at` is in nats a token by "T=...", in windows of T. All lengths read the same
        text: the first WINDOWS windows of the longest length.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        found = measure_run(self.config, self.folder, choose_device(None, None))
        model, _, _ = load_model(self.folder / "model", device=torch.device("cpu"))
        lengths = {f"T={T}": T for T in self.test_lengths}
        losses = loss_by_length(model, self.config, lengths=lengths, windows=WINDOWS)
        return found | {"loss_at": losses}

    def attempt(self, folder: Path, device: torch.device) -> dict[str, Any] | Exception:
        """Do as `run`, but return the error of a training that fails; see `side_by_side`.

        Raises:
            UserError: see `failure`; it ends the other trainings too.
        """
        try:
            return self.run()
        except Exception as error:
            failure(error)
            return error


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
        self._found: list[dict[str, Any] | Exception] = []
        self.all = []
        for model, recipe in models.items():
            changes = {key: getattr(budget, key) for key in SIZES}
            config = replace(recipe, **changes, micro_batch_size=None)
            config = replace(config, eval_every=budget.steps, checkpoint_every=budget.steps)
            self.all.append(Training(model, config, runs / recipe.name, budget.test_lengths))

    @property
    def trained(self) -> tuple[str, ...]:
        """The models whose training has succeeded; none before the first call."""
        outcomes = zip(self.all, self._found, strict=False)
        return tuple(t.model for t, found in outcomes if not isinstance(found, Exception))

    def results(self, models: Sequence[str] = ()) -> Iterator[tuple[Training, dict[str, Any]]]:
        """Yield each training of these models (none: of all) with its results.

        The first call trains. A training that failed raises its error here, at each call, and is
        not started again.
        """
        if not self._found:
            try:
                self._found = self._train()
            except Exception as error:
                self._found = [error] * len(self.all)
        for training, found in zip(self.all, self._found, strict=True):
            if training.model in models or not models:
                if isinstance(found, Exception):
                    raise found
                yield training, found

    def measurement(self, models: Sequence[str], by_length: bool) -> Measurement:
        """Return the perplexity or the loss by test length of some models, or of all."""
        entries = []
        for training, found in self.results(models):
            values = {PERPLEXITY: found["perplexity"]}
            if by_length:
                values = found["loss_at"]
            details = {name: found[name] for name in ("parameters", "steps")}
            entries += [
                Entry(training.model, column, value, seed=training.config.seed, details=details)
                for column, value in values.items()
            ]
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
        _, found = next(self.results(self.trained))
        budget = self.budget
        tokens = budget.steps * budget.batch_size * budget.seq_len
        return (
            f"models of {found['parameters'] / 1e6:.1f}M weights, {budget.steps} steps of "
            f"{budget.batch_size} sequences of {budget.seq_len} bytes ({tokens:,} in all) of "
            "three Austen novels"
        )

    def _train(self) -> list[dict[str, Any] | Exception]:
        """Train each model once, and return what came of each, or its error.

        Small models gain little from a second thread, so with `budget.parallel` each core trains a
        model of its own, with one thread each. On one GPU several would slow each other down.
        """
        processes = 1
        if self.budget.parallel and not torch.cuda.is_available():
            mine = hasattr(os, "sched_getaffinity")  # the cores that this process may use
            cores = len(os.sched_getaffinity(0)) if mine else os.cpu_count() or 1
            processes = min(cores, MAX_PROCESSES)
        calls = {i: training.attempt for i, training in enumerate(self.all)}
        name, found = "training the tiny models", dict[int, dict[str, Any] | Exception]()
        self._watch(name, 0, len(calls))
        for i, each in side_by_side(calls, self._runs, torch.device("cpu"), processes):
            found[i] = each
            self._watch(name, len(found), len(calls))
        return [found[i] for i in range(len(calls))]


def write_sample(trainings: Trainings, model: str, num_tokens: int) -> Sample:
    """Let a model continue PROMPT."""
    training = next(training for training in trainings.all if training.model == model)
    trained, _, extra = load_model(training.folder / "model", device=torch.device("cpu"))
    tokenizer = load_tokenizer(extra["tokenizer"])
    (tokens,) = generate(
        trained,
        [tokenizer.encode(PROMPT)],
        max_new_tokens=num_tokens,
        temperature=0.8,
        stop_tokens=(tokenizer.eos_token,),
        seed=0,
    )
    title = f"{num_tokens} bytes by the tiny {model}, temperature 0.8"
    return Sample(title, PROMPT, tokenizer.decode(tokens))
