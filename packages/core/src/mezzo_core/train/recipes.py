"""A package's recipes: named functions, each of which returns a whole training run."""

from collections.abc import Callable, Mapping

from mezzo_core.errors import UserError, nearest
from mezzo_core.train.config import TrainConfig

Recipes = Mapping[str, Callable[[], TrainConfig]]


def find_recipe(recipes: Recipes, name: str) -> TrainConfig:
    """Return the recipe of this name.

    Raises:
        UserError: if there is no such recipe; the message shows similar names.
    """
    if name not in recipes:
        raise UserError(f"no recipe is named {name!r}{nearest(name, recipes)}")
    return recipes[name]()
