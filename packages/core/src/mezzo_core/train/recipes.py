"""A package's recipes: named functions, each of which returns a whole training run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import TrainConfig, Training

Recipes = Mapping[str, Callable[[], TrainConfig]]
Made = TypeVar("Made")


def by_size(
    sizes: Mapping[str, tuple[Any, Iterable[str]]], make: Callable[[str, str], Made]
) -> dict[str, Made]:
    """Return `make(size, architecture)` by the recipe's name, for all architectures of all sizes.

    `sizes` has what makes each size, and its architectures.
    """
    return {
        f"{size}_{architecture}": make(size, architecture)
        for size, (_, architectures) in sizes.items()
        for architecture in architectures
    }


@dataclass(frozen=True, kw_only=True)
class AbstractHyperparameters(Training):
    """What all architectures of one comparison share; a paper adds what its models need."""

    vocab_size: int
    d_model: int

    def run(self, name: str, model: LMConfig) -> TrainConfig:
        """Return the run of one model with these hyperparameters."""
        training = {field.name: getattr(self, field.name) for field in fields(Training)}
        return TrainConfig(name, model, **training)
