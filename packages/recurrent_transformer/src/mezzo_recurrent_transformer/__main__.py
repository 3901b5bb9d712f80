"""`mezzo-recurrent-transformer`: train, generate, eval, bench, reproduce, synthetic."""

import sys
from collections.abc import Sequence
from typing import NoReturn


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    try:
        from mezzo_core.cli import Paper, make_app, run

        from mezzo_recurrent_transformer.bench import bench
        from mezzo_recurrent_transformer.claims import REPRODUCTION
        from mezzo_recurrent_transformer.recipes import RECIPES
        from mezzo_recurrent_transformer.synthetic.command import synthetic
    except ModuleNotFoundError as error:
        sys.exit(
            f"error: the commands need the package {error.name}: "
            "pip install 'mezzo-recurrent-transformer[train]' brings it"
        )
    paper = Paper(
        command="mezzo-recurrent-transformer",
        title="The Recurrent Transformer: layers that attend to keys and values of their outputs.",
        recipes=RECIPES,
        bench=bench,
        reproduce=REPRODUCTION.reproduce,
        scales=tuple(REPRODUCTION.scales),
    )
    app = make_app(paper)
    app.command()(synthetic)
    run(app, arguments)


if __name__ == "__main__":
    main()
