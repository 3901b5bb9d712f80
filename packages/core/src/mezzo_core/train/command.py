"""The command `train`, with a flag for each setting of a recipe."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from mezzo_core.docstrings import with_parameters
from mezzo_core.options import AllowPackage, Answers, InitFrom, TrainData, ValidationData
from mezzo_core.paper import Paper
from mezzo_core.paths import expanded
from mezzo_core.train.flags import FLAGS


def make_command(paper: Paper) -> Callable[..., None]:
    """Return the command for a package's recipes."""

    def train_command(
        recipe: Annotated[
            str, typer.Argument(help="The recipe's name.", autocompletion=paper.names)
        ],
        *,
        data: TrainData = None,
        validation_data: ValidationData = None,
        sft: Answers = None,
        init_from: InitFrom = None,
        allow_package: AllowPackage = None,
        settings: Annotated[
            list[str] | None,
            typer.Option(
                "--set",
                help="Any other setting that `show RECIPE` shows, such as "
                "model.mixers.head_dim=32 (in every layer that has it); repeat for several.",
                metavar="SETTING=VALUE",
            ),
        ] = None,
        out: Annotated[
            Path | None,
            typer.Option(help="Where the run is kept. Default: runs/RECIPE.", callback=expanded),
        ] = None,
        fresh: Annotated[
            bool, typer.Option("--fresh", help="Start over instead of resuming what --out holds.")
        ] = False,
        new_data: Annotated[
            bool, typer.Option("--new-data", help="Go on even if the text has changed since.")
        ] = False,
        quiet: Annotated[bool, typer.Option("--quiet", help="No progress bar.")] = False,
        **flags: Any,
    ) -> None:
        """Train a model by a recipe.

        Settings that are not given are the recipe's; `show RECIPE` shows them, `recipes` lists
        recipes.
        """
        paper.check_name(recipe)
        from mezzo_core.train.run_recipe import configure, run_recipe

        config = paper.recipes()[recipe]()
        texts, out = (data or (), validation_data, sft), out or Path("runs") / recipe
        start = (init_from, None if fresh else out, allow_package or ())
        config = configure(config, flags, settings or (), *texts, *start)
        run_recipe(config, out, fresh, new_data, quiet)

    return with_parameters(train_command, (flag.parameter() for flag in FLAGS))
