"""`mezzo-gsa`: train, generate, eval, bench, reproduce, and besides convert and mqar."""

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from mezzo_gsa import __version__

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
            "pip install 'mezzo-gsa[train]' brings it"
        )
    paper = Paper(
        command="mezzo-gsa",
        title="GSA: gated slot attention, its family, and Transformers fine-tuned into RNNs.",
        version=__version__,
        recipes=_recipes,
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_gsa", "tiny_attention", steps=100, batch_size=2),
        bench=_bench,
        reproduction=_reproduction,
        commands={
            "convert": LazyCommand(
                "Turn a Transformer into an RNN that keeps its weights, to be fine-tuned.", _convert
            ),
            "mqar": LazyCommand(
                "Train GSA and other mixers on multi-query associative recall (MQAR), and compare "
                "them.",
                _mqar,
            ),
        },
    )
    run(make_app(paper), arguments)


def _recipes() -> "Recipes":
    from mezzo_gsa.recipes import RECIPES

    return RECIPES


def _bench() -> "Bench":
    from mezzo_gsa.speed import SPEEDS

    return SPEEDS.bench


def _reproduction() -> "Reproduction":
    from mezzo_gsa.claims import REPRODUCTION

    return REPRODUCTION


def _convert() -> Callable[..., None]:
    from mezzo_gsa.convert.command import convert_command

    return convert_command


def _mqar() -> Callable[..., None]:
    from mezzo_gsa.mqar.command import mqar

    return mqar


if __name__ == "__main__":
    main()
