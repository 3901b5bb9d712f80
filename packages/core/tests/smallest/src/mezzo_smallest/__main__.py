"""`mezzo-smallest`: train, generate, eval."""

from collections.abc import Sequence
from typing import NoReturn

from mezzo_core.cli import Paper, make_app, run
from mezzo_core.nn import LMConfig
from mezzo_core.train.config import TrainConfig

from mezzo_smallest import LookBackConfig


def tiny() -> TrainConfig:
    """Return a training of seconds on the embedded novels."""
    model = LMConfig(vocab_size=257, d_model=32, mixers=(LookBackConfig(),) * 2)
    return TrainConfig("tiny", model, seq_len=32, batch_size=4, steps=6)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command line with these arguments (default: the process's own)."""
    paper = Paper("mezzo-smallest", "Looks back a few tokens.", "0.1.0", lambda: {"tiny": tiny})
    run(make_app(paper), arguments)


if __name__ == "__main__":
    main()
