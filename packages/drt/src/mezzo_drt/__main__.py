"""`mezzo-drt`: train, generate, eval, bench, reproduce."""

from collections.abc import Sequence
from typing import NoReturn

from mezzo_core.paper import Demo
from mezzo_core.program import start


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    start(
        "mezzo_drt",
        arguments,
        title="DRT: learned retrieval of past chunks inside attention.",
        demo=Demo("tiny_drt1", "tiny_base", steps=100, batch_size=4),
    )


if __name__ == "__main__":
    main()
