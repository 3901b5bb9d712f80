"""`mezzo-rat`: train, generate, eval, bench, reproduce."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from mezzo_rat import __version__


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
        recipes=partial(resolve_name, "mezzo_rat.recipes:RECIPES"),
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_rat_l16", "tiny_attention", steps=100, batch_size=2),
        bench=partial(resolve_name, "mezzo_rat.reproduction.speed:SPEEDS.bench"),
        reproduction=partial(resolve_name, "mezzo_rat.reproduction.claims:REPRODUCTION"),
    )
    run(make_app(paper), arguments)


if __name__ == "__main__":
    main()
