"""`mezzo-recurrent-transformer`: train, generate, eval, bench, reproduce, synthetic."""

from collections.abc import Sequence
from typing import NoReturn

from mezzo_core.paper import Demo
from mezzo_core.program import start


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    start(
        "mezzo_recurrent_transformer",
        arguments,
        title="The Recurrent Transformer: layers that attend to keys and values of their outputs.",
        demo=Demo("tiny_recurrent", "tiny_transformer", steps=30, batch_size=32),
        commands={"synthetic": "reproduction.synthetic_command:synthetic"},
    )


if __name__ == "__main__":
    main()
