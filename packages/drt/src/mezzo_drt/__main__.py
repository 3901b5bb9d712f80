"""`mezzo-drt`: train, generate, eval, bench, reproduce."""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    try:
        from mezzo_core.cli import Paper, make_app, run

        from mezzo_drt.bench import bench
        from mezzo_drt.claims import REPRODUCTION
        from mezzo_drt.recipes import RECIPES
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            "pip install 'mezzo-drt[train]' brings it"
        )
    paper = Paper(
        command="mezzo-drt",
        title="DRT: learned retrieval of past chunks inside attention.",
        recipes=RECIPES,
        bench=bench,
        reproduce=REPRODUCTION.reproduce,
        scales=tuple(REPRODUCTION.scales),
    )
    run(make_app(paper), arguments)


if __name__ == "__main__":
    main()
