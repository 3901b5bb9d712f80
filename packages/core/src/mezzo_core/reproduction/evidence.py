"""What a reproduction measures, each part run once and only when a table or claim asks for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from mezzo_core.papers import Measurement, ResultRow
from mezzo_core.reproduction.training import Budget, TrainedRun, train_all
from mezzo_core.train.config import TrainConfig

Result = TypeVar("Result")
Watch = Callable[[str, int, int], None]
"""Called with what runs now, how much of it is done, and of how much."""


class Once:
    """Pieces of work, each done at the first call; later ones get its result, or its error."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._outcomes: dict[str, Future[Any]] = {}

    def get(self, name: str, work: Callable[[Callable[[int, int], None]], Result]) -> Result:
        """Return what the work of this name gave; `work` is called with where to tell progress."""
        if name not in self._outcomes:
            self._watch(name, 0, 1)
            outcome: Future[Any] = Future()
            try:
                outcome.set_result(work(lambda done, of: self._watch(name, done, of)))
            except Exception as error:
                outcome.set_exception(error)
            self._outcomes[name] = outcome
        return self._outcomes[name].result()

    def went_well(self, name: str) -> bool:
        """Tell whether the work of this name was asked for and gave a result."""
        return name in self._outcomes and self._outcomes[name].exception() is None


class Trainings:
    """The tiny trainings of one reproduction, and what they say."""

    def __init__(
        self, models: Mapping[str, TrainConfig], budget: Budget, folder: Path, once: Once
    ) -> None:
        """Describe them; nothing is trained before a result is asked for.

        Args:
            models: recipes by the paper's names.
            budget: of each training.
            folder: where the runs are kept.
            once: what else this reproduction does once.
        """
        self.models = models
        self.budget = budget
        self._folder = folder
        self._once = once
        self._name = "training the tiny models"

    @property
    def runs(self) -> Sequence[TrainedRun]:
        """Every run, all seeds."""
        return self._once.get(
            self._name, lambda watch: train_all(self.models, self.budget, self._folder, watch)
        )

    @property
    def done(self) -> bool:
        """Whether the trainings were asked for and went well."""
        return self._once.went_well(self._name)

    def seeds_of(self, model: str) -> list[TrainedRun]:
        """Return a model's runs, in the order of the seeds."""
        return [run for run in self.runs if run.model == model]

    def perplexity(self, models: Iterable[str] | None = None) -> Measurement:
        """Return the validation perplexity of some models, or of all."""
        return self._measurement(
            ("Val. PPL",),
            models,
            lambda run: (run.perplexity,),
            self.setting,
            "perplexity a byte",
        )

    def loss_by_length(self, models: Iterable[str]) -> Measurement:
        """Return the validation loss of some models by test length."""
        lengths = self.budget.test_lengths
        return self._measurement(
            tuple(f"T={length}" for length in lengths),
            models,
            lambda run: tuple(run.loss_at[T] for T in lengths),
            f"{self.setting}; the loss over the same validation text in windows of T",
            "nats a byte",
        )

    @property
    def setting(self) -> str:
        """What every training shares, in words."""
        run = self.runs[0]
        tokens = self.budget.steps * self.budget.batch_size * run.seq_len
        return (
            f"models of {run.parameters / 1e6:.1f}M weights, {self.budget.steps} steps of "
            f"{self.budget.batch_size} sequences of {run.seq_len} bytes ({tokens:,} in all) of "
            "three Austen novels; the seeds change the initial weights, not the text or its order"
        )

    def _measurement(
        self,
        columns: tuple[str, ...],
        models: Iterable[str] | None,
        values: Callable[[TrainedRun], tuple[float, ...]],
        setting: str,
        unit: str,
    ) -> Measurement:
        rows = (
            ResultRow(model, tuple(values(run) for run in self.seeds_of(model)))
            for model in (self.models if models is None else models)
        )
        return Measurement(columns, tuple(rows), setting, unit=unit, seeds=self.budget.seeds)
