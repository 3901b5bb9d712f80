"""`mezzo-gsa`: train, generate, eval, bench, reproduce, and besides convert and mqar."""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    try:
        from mezzo_core.cli import Paper, make_app, run

        from mezzo_gsa.bench import bench
        from mezzo_gsa.claims import REPRODUCTION
        from mezzo_gsa.convert.command import convert_command
        from mezzo_gsa.mqar.command import mqar
        from mezzo_gsa.recipes import RECIPES
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            "pip install 'mezzo-gsa[train]' brings it"
        )
    paper = Paper(
        command="mezzo-gsa",
        title="GSA: gated slot attention, its family, and Transformers fine-tuned into RNNs.",
        recipes=RECIPES,
        bench=bench,
        reproduce=REPRODUCTION.reproduce,
        scales=tuple(REPRODUCTION.scales),
    )
    app = make_app(paper)
    app.command(name="convert")(convert_command)
    app.command()(mqar)
    run(app, arguments)


if __name__ == "__main__":
    main()
