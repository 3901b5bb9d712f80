"""`mezzo-rat`: train, generate, eval, bench, reproduce."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mezzo_rat import __version__

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
            "pip install 'mezzo-rat[train]' brings it"
        )
    paper = Paper(
        command="mezzo-rat",
        title="RAT: a gated linear RNN inside chunks, softmax attention across chunk ends.",
        version=__version__,
        recipes=_recipes,
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_rat_l16", "tiny_attention", steps=100, batch_size=2),
        bench=_bench,
        reproduction=_reproduction,
    )
    run(make_app(paper), arguments)


def _recipes() -> "Recipes":
    from mezzo_rat.recipes import RECIPES

    return RECIPES


def _bench() -> "Bench":
    from mezzo_rat.speed import SPEEDS

    return SPEEDS.bench


def _reproduction() -> "Reproduction":
    from mezzo_rat.claims import REPRODUCTION

    return REPRODUCTION


if __name__ == "__main__":
    main()
