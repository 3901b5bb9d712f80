"""`mezzo-drt`: train, generate, eval, bench, reproduce."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mezzo_drt import __version__

if TYPE_CHECKING:
    from mezzo_core.paper import Bench
    from mezzo_core.papers.reproduction import Reproduction
    from mezzo_core.train.recipes import Recipes


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
        recipes=_recipes,
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_drt1", "tiny_base", steps=100, batch_size=4),
        bench=_bench,
        reproduction=_reproduction,
    )
    run(make_app(paper), arguments)


def _recipes() -> "Recipes":
    from mezzo_drt.recipes import RECIPES

    return RECIPES


def _bench() -> "Bench":
    from mezzo_drt.speed import SPEEDS

    return SPEEDS.bench


def _reproduction() -> "Reproduction":
    from mezzo_drt.claims import REPRODUCTION

    return REPRODUCTION


if __name__ == "__main__":
    main()
