"""A package's recipes: named functions, each of which returns a whole training run."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import TrainConfig, Training

Recipes = Mapping[str, Callable[[], TrainConfig]]


def by_size(
    sizes: Mapping[str, tuple[Any, Iterable[str]]],
    recipe: Callable[[str, str], TrainConfig],
    descriptions: Mapping[str, str],
) -> tuple[dict[str, Callable[[], TrainConfig]], dict[str, str]]:
    """Return all recipes by name, and the description of each.

    Args:
        sizes: what makes each size, and its architectures.
        recipe: returns the run of one size and architecture.
        descriptions: of the architectures.
    """
    recipes: dict[str, Callable[[], TrainConfig]] = {}
    summaries = {}
    for size, (_, architectures) in sizes.items():
        for architecture in architectures:
            name = f"{size}_{architecture}"
            recipes[name] = partial(recipe, size, architecture)
            summaries[name] = descriptions[architecture]
    return recipes, summaries


@dataclass(frozen=True, kw_only=True)
class AbstractHyperparameters(Training):
    """What all architectures of one comparison share; a paper adds what its models need."""

    vocab_size: int
    d_model: int

    def run(self, name: str, model: LMConfig) -> TrainConfig:
        """Return the run of one model with these hyperparameters."""
        training = {field.name: getattr(self, field.name) for field in fields(Training)}
        return TrainConfig(name, model, **training)
