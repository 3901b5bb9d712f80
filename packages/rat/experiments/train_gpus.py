"""Train the paper's models for a few steps on one GPU and on two: speed, memory, loss.

    python packages/rat/experiments/train_gpus.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/train_gpus.py --out DIR --dry-run      # toy sizes, on a CPU

Writes train_gpus.json, from the logs of the trainings.
"""

import sys
from dataclasses import replace
from itertools import product

from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.gpus import time_trainings
from mezzo_core.train.config import TrainConfig
from mezzo_rat.recipes import PAPER_NAMES, recipe

SETTINGS = {"1 GPU": 1, "2 GPUs": 2, "1 GPU, activations computed again": 1}
"""How many processes train."""
ROWS = {
    f"{PAPER_NAMES[architecture]}, {size}, {setting}": (size, architecture, setting)
    for size, architecture, setting in product(("200m", "1p3b"), ("rat_l16", "attention"), SETTINGS)
}
TOKENS = 131_072
"""Of a step."""


def measure(options: Options) -> None:
    """Train each model in the settings for which this machine has GPUs."""

    def run(size: str, architecture: str, setting: str) -> TrainConfig:
        config = recipe("tiny" if options.dry_run else size, architecture)
        again = "again" in setting
        size_of_batch = TOKENS // config.seq_len
        return replace(config, batch_size=size_of_batch, activation_checkpointing=again)

    rows = {name: (run(*row), SETTINGS[row[-1]]) for name, row in ROWS.items()}
    time_trainings(options, rows, f"{TOKENS:,} tokens")


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(ROWS), trains=True))
