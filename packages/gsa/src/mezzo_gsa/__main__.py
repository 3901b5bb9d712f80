"""`mezzo-gsa`: train, generate, eval, bench, reproduce, and besides convert and mqar."""

from collections.abc import Sequence
from typing import NoReturn

from mezzo_core.paper import Demo
from mezzo_core.program import start


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    start(
        "mezzo_gsa",
        arguments,
        title="GSA: gated slot attention, its family, and Transformers fine-tuned into RNNs.",
        demo=Demo("tiny_gsa", "tiny_attention", steps=100, batch_size=2),
        commands={
            "convert": "convert_command:convert_command",
            "mqar": "reproduction.mqar_command:mqar",
        },
        layouts={"fla": "fla.layout:LAYOUT"},
    )


if __name__ == "__main__":
    main()
