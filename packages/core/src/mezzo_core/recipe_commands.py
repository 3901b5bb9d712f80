"""The commands `recipes` and `show`, which list and describe a package's recipes."""

from typing import Annotated

import typer

from mezzo_core.console import show_table
from mezzo_core.errors import UserError
from mezzo_core.paper import Paper
from mezzo_core.recipe_table import count_in_words


def add_recipe_commands(app: typer.Typer, paper: Paper) -> None:
    """Add `recipes` and `show`."""

    @app.command()
    def recipes(
        words: Annotated[
            list[str] | None, typer.Argument(help="Parts of names, such as tiny; all by default.")
        ] = None,
    ) -> None:
        """List the recipes, with their sizes."""
        rows = [row for row in paper.rows() if all(word in row.name for word in words or ())]
        if not rows:
            raise UserError(f"no recipe's name has {' and '.join(map(repr, words or ()))} in it")
        shown = [
            (row.name, *map(count_in_words, (row.weights, row.tokens)), str(row.context), row.what)
            for row in rows
        ]
        show_table(("recipe", "weights", "tokens", "T", "what it is"), shown)

    @app.command(name="show")
    def show_command(
        recipe: Annotated[
            str, typer.Argument(help="The recipe's name.", autocompletion=paper.names)
        ],
    ) -> None:
        """Show all settings of a recipe, and the flags of `train` that change them."""
        paper.check_name(recipe)
        from mezzo_core.train.settings import describe_settings

        show_table(("setting", "value", "flag"), describe_settings(paper.recipes()[recipe]()))
