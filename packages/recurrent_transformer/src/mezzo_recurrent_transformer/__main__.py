"""`mezzo-recurrent-transformer`: train, generate, eval, bench, reproduce, synthetic."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mezzo_recurrent_transformer import __version__

if TYPE_CHECKING:
    from mezzo_core.paper import Bench
    from mezzo_core.papers.reproduction import Reproduction
    from mezzo_core.train.recipes import Recipes


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    try:
        from mezzo_core.cli import Demo, Paper, make_app, run
        from mezzo_core.lazy_commands import LazyCommand
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            "pip install 'mezzo-recurrent-transformer[train]' brings it"
        )
    paper = Paper(
        command="mezzo-recurrent-transformer",
        title="The Recurrent Transformer: layers that attend to keys and values of their outputs.",
        version=__version__,
        recipes=_recipes,
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_recurrent", "tiny_transformer", steps=30, batch_size=32),
        bench=_bench,
        reproduction=_reproduction,
        commands={
            "synthetic": LazyCommand(
                "Train one recurrent layer and one Transformer layer on synthetic tasks, and "
                "compare them.",
                _synthetic,
            )
        },
    )
    run(make_app(paper), arguments)


def _recipes() -> "Recipes":
    from mezzo_recurrent_transformer.recipes import RECIPES

    return RECIPES


def _bench() -> "Bench":
    from mezzo_recurrent_transformer.speed import SPEEDS

    return SPEEDS.bench


def _reproduction() -> "Reproduction":
    from mezzo_recurrent_transformer.claims import REPRODUCTION

    return REPRODUCTION


def _synthetic() -> Callable[..., None]:
    from mezzo_recurrent_transformer.synthetic.command import synthetic

    return synthetic


if __name__ == "__main__":
    main()
