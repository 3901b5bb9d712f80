"""`mezzo-drt`: train, generate, eval, bench, reproduce."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from mezzo_drt import __version__


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    try:
        from mezzo_core.cli import Demo, Paper, make_app, run
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            "pip install 'mezzo-drt[train]' brings it"
        )
    paper = Paper(
        command="mezzo-drt",
        title="DRT: learned retrieval of past chunks inside attention.",
        version=__version__,
        recipes=partial(resolve_name, "mezzo_drt.recipes:RECIPES"),
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_drt1", "tiny_base", steps=100, batch_size=4),
        bench=partial(resolve_name, "mezzo_drt.reproduction.speed:SPEEDS.bench"),
        reproduction=partial(resolve_name, "mezzo_drt.reproduction.claims:REPRODUCTION"),
    )
    run(make_app(paper), arguments)


if __name__ == "__main__":
    main()
