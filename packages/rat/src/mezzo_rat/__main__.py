"""`mezzo-rat`: train, generate, eval, bench, reproduce."""

from collections.abc import Sequence
from typing import NoReturn

from mezzo_core.paper import Demo
from mezzo_core.program import start


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    start(
        "mezzo_rat",
        arguments,
        title="RAT: a gated linear RNN inside chunks, softmax attention across chunk ends.",
        demo=Demo("tiny_rat_l16", "tiny_attention", steps=100, batch_size=2),
    )


if __name__ == "__main__":
    main()
