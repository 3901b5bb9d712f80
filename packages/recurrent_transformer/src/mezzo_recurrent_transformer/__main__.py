"""`mezzo-recurrent-transformer`: train, generate, eval, bench, reproduce, synthetic."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from mezzo_recurrent_transformer import __version__


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    try:
        from mezzo_core.cli import Demo, Paper, make_app, run

        from mezzo_recurrent_transformer.reproduction.synthetic_command import synthetic
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            "pip install 'mezzo-recurrent-transformer[train]' brings it"
        )
    paper = Paper(
        command="mezzo-recurrent-transformer",
        title="The Recurrent Transformer: layers that attend to keys and values of their outputs.",
        version=__version__,
        recipes=partial(resolve_name, "mezzo_recurrent_transformer.recipes:RECIPES"),
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_recurrent", "tiny_transformer", steps=30, batch_size=32),
        bench=partial(resolve_name, "mezzo_recurrent_transformer.reproduction.speed:SPEEDS.bench"),
        reproduction=partial(
            resolve_name, "mezzo_recurrent_transformer.reproduction.claims:REPRODUCTION"
        ),
        commands={"synthetic": synthetic},
    )
    run(make_app(paper), arguments)


if __name__ == "__main__":
    main()
