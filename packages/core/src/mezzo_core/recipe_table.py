"""The table of a package's recipes: names, sizes and descriptions.

Only torch can tell a model's number of weights. So a package keeps its table in a file, and
`recipes` or a mistyped name need not wait for torch. After a change of recipes a test fails until
the files are written again:

    python -m mezzo_core.recipe_table mezzo_rat mezzo_gsa
"""

import csv
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mezzo_core.errors import UserError

if TYPE_CHECKING:
    from mezzo_core.train.recipes import Recipes

FILE = "recipes.csv"


class RecipeRow(NamedTuple):
    """One recipe of the table."""

    name: str
    weights: int
    tokens: int
    """Tokens of the whole training."""
    context: int
    """T, tokens of a sequence."""
    what: str
    """A description."""


def read_table(path: Path) -> list[RecipeRow]:
    """Read the table that `write_table` wrote.

    Raises:
        UserError: if it is damaged.
    """
    with path.open(encoding="utf-8", newline="") as file:
        lines = csv.reader(file)
        try:
            if tuple(next(lines, ())) != RecipeRow._fields:
                raise ValueError
            return [
                RecipeRow(name, int(weights), int(tokens), int(context), what)
                for name, weights, tokens, context, what in lines
            ]
        except ValueError:
            raise UserError(f"{path} is no table of recipes: install the package anew") from None


def make_table(recipes: "Recipes", summaries: Mapping[str, str]) -> list[RecipeRow]:
    """Make the table; without summaries, the first lines of recipes' docstrings describe them."""
    import torch

    rows = []
    for name, recipe in recipes.items():
        config = recipe()
        with torch.device("meta"):
            weights = config.model.build().num_parameters()
        lines = (getattr(recipe, "__doc__", None) or "").strip().splitlines()
        what = summaries[name] if summaries else next(iter(lines), "")
        tokens = config.steps * config.batch_size * config.seq_len
        rows.append(RecipeRow(name, weights, tokens, config.seq_len, what))
    return rows


def write_table(path: Path, rows: list[RecipeRow]) -> None:
    """Write a table for `read_table`."""
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([RecipeRow._fields, *rows])


def count_in_words(count: int) -> str:
    """Round a count to three digits, such as 1.28B."""
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if count >= size:
            return f"{float(f'{count / size:.3g}'):g}{letter}"
    return str(count)


if __name__ == "__main__":
    for package in sys.argv[1:]:
        found = import_module(f"{package}.recipes")
        write_table(
            Path(found.__file__ or "").with_name(FILE), make_table(found.RECIPES, found.SUMMARIES)
        )
