"""`mezzo-gsa`: train, generate, eval, bench, reproduce, and besides convert and mqar."""

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import NoReturn

from mezzo_gsa import __version__


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    try:
        from mezzo_core.cli import Demo, Paper, make_app, run

        from mezzo_gsa.convert_command import convert_command
        from mezzo_gsa.reproduction.mqar_command import mqar
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            "pip install 'mezzo-gsa[train]' brings it"
        )
    paper = Paper(
        command="mezzo-gsa",
        title="GSA: gated slot attention, its family, and Transformers fine-tuned into RNNs.",
        version=__version__,
        recipes=partial(resolve_name, "mezzo_gsa.recipes:RECIPES"),
        table=Path(__file__).with_name("recipes.csv"),
        demo=Demo("tiny_gsa", "tiny_attention", steps=100, batch_size=2),
        bench=partial(resolve_name, "mezzo_gsa.reproduction.speed:SPEEDS.bench"),
        reproduction=partial(resolve_name, "mezzo_gsa.reproduction.claims:REPRODUCTION"),
        layouts={"fla": partial(resolve_name, "mezzo_gsa.fla.layout:LAYOUT")},
        commands={"convert": convert_command, "mqar": mqar},
    )
    run(make_app(paper), arguments)


if __name__ == "__main__":
    main()
