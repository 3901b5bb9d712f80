"""A package's recipes: named functions, each of which returns a whole training run."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields

from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import TrainConfig, Training

Recipes = Mapping[str, Callable[[], TrainConfig]]


@dataclass(frozen=True, kw_only=True)
class AbstractHyperparameters(Training):
    """What all architectures of one comparison share; a paper adds what its models need.

    Attributes:
        vocab_size, d_model: of the model.
    """

    vocab_size: int
    d_model: int

    def run(self, name: str, model: LMConfig) -> TrainConfig:
        """Return the run of one model with these hyperparameters."""
        training = {field.name: getattr(self, field.name) for field in fields(Training)}
        return TrainConfig(name, model, **training)
