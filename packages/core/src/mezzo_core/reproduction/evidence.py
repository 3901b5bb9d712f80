"""The measurements of a reproduction: each is made once, when a table or claim first needs it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from mezzo_core.papers import Measurement, ResultRow
from mezzo_core.reproduction.training import Budget, TrainedRun, train_all
from mezzo_core.train.config import TrainConfig

Result = TypeVar("Result")
Watch = Callable[[str, int, int], None]
"""Called with the name of the running work, how much of it is done, and how much there is."""


class Once:
    """Runs each piece of work at its first request; later requests get its result or its error."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._outcomes: dict[str, Future[Any]] = {}

    def get(self, name: str, work: Callable[[Callable[[int, int], None]], Result]) -> Result:
        """Return the result of the work of this name, running it if it has not run yet.

        `work` is called with a function (done, of) to which it reports its progress.
        """
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
        """Tell whether the work of this name has run without an error."""
        return name in self._outcomes and self._outcomes[name].exception() is None


class Trainings:
    """The tiny trainings of one reproduction, and their measurements."""

    def __init__(
        self, models: Mapping[str, TrainConfig], budget: Budget, folder: Path, once: Once
    ) -> None:
        """Describe the trainings. They run when a result is first requested.

        Args:
            models: recipes by the paper's names of the models.
            budget: budget of each training.
            folder: folder for the runs.
            once: runs the trainings once, with the other work of this reproduction.
        """
        self.models = models
        self.budget = budget
        self._folder = folder
        self._once = once
        self._name = "training the tiny models"

    @property
    def runs(self) -> Sequence[TrainedRun]:
        """All runs, with all seeds."""
        return self._once.get(
            self._name, lambda watch: train_all(self.models, self.budget, self._folder, watch)
        )

    @property
    def done(self) -> bool:
        """Whether the trainings have run without an error."""
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
        """The setting that all trainings share, in words."""
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
