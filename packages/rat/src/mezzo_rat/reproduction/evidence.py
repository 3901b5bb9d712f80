"""What a reproduction measures, each part run once and only when a table or claim asks for it."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from mezzo_core.papers import Measurement, ResultRow

from mezzo_rat.reproduction.scale import RECIPES_OF_MODELS, Scale
from mezzo_rat.reproduction.timing import time_generation, time_layers
from mezzo_rat.reproduction.training import TrainedRun, train_all

Result = TypeVar("Result")
Watch = Callable[[str, int, int], None]
"""Called with what runs now, how much of it is done, and of how much."""


class Evidence:
    """The trainings and timings of one reproduction at one scale."""

    def __init__(self, scale: Scale, out: Path, watch: Watch) -> None:
        self.scale = scale
        self.out = out
        self._watch = watch
        self._outcomes: dict[str, Future[Any]] = {}

    @property
    def runs(self) -> Sequence[TrainedRun]:
        """Every tiny training, all seeds."""
        name = "training the tiny models"

        def watch(done: int, of: int) -> None:
            self._watch(name, done, of)

        return self._once(name, lambda: train_all(self.scale, self.out / "runs", watch))

    @property
    def layers(self) -> dict[str, Measurement]:
        """Times of single layers, by phase."""
        return self._once("timing single layers", lambda: time_layers(self.scale))

    @property
    def generation(self) -> Measurement:
        """Tokens a second that whole models generate."""
        return self._once("timing generation", lambda: time_generation(self.scale))

    @property
    def trained(self) -> bool:
        """Whether the trainings were asked for and went well."""
        return self._went_well("training the tiny models")

    @property
    def timed(self) -> bool:
        """Whether the layers' timing was asked for and went well."""
        return self._went_well("timing single layers")

    def _once(self, name: str, work: Callable[[], Result]) -> Result:
        """Do the work at the first call; later ones get its result, or its error, again."""
        if name not in self._outcomes:
            self._watch(name, 0, 1)
            outcome: Future[Any] = Future()
            try:
                outcome.set_result(work())
            except Exception as error:
                outcome.set_exception(error)
            self._outcomes[name] = outcome
        return self._outcomes[name].result()

    def _went_well(self, name: str) -> bool:
        return name in self._outcomes and self._outcomes[name].exception() is None

    def seeds_of(self, model: str) -> list[TrainedRun]:
        """Return an architecture's runs, in the order of the seeds."""
        return [run for run in self.runs if run.model == model]

    def perplexity(self, models: Sequence[str] = tuple(RECIPES_OF_MODELS)) -> Measurement:
        """Return the validation perplexity of the tiny models."""
        rows = (
            ResultRow(model, tuple((run.perplexity,) for run in self.seeds_of(model)))
            for model in models
        )
        return Measurement(
            ("Val. PPL",),
            tuple(rows),
            self.training_setting,
            unit="perplexity a byte",
            seeds=self.scale.seeds,
        )

    def loss_by_length(self, models: Sequence[str]) -> Measurement:
        """Return the validation loss of the tiny models by test length."""
        lengths = self.scale.test_lengths
        rows = (
            ResultRow(
                model,
                tuple(tuple(run.loss_at[T] for T in lengths) for run in self.seeds_of(model)),
            )
            for model in models
        )
        return Measurement(
            tuple(f"T={length}" for length in lengths),
            tuple(rows),
            f"{self.training_setting}; the loss over the same validation text in windows of T",
            unit="nats a byte",
            seeds=self.scale.seeds,
        )

    @property
    def training_setting(self) -> str:
        """What every tiny training shares, in words."""
        run = self.runs[0]
        tokens = self.scale.steps * self.scale.batch_size * run.seq_len
        return (
            f"models of {run.parameters / 1e6:.1f}M weights, {self.scale.steps} steps of "
            f"{self.scale.batch_size} sequences of {run.seq_len} bytes ({tokens:,} in all) of "
            "three Austen novels; the seeds change the initial weights, not the text or its order"
        )
