"""Train the paper's largest models for a few steps on one GPU and on two: speed, memory, loss.

    python packages/recurrent_transformer/experiments/train_gpus.py --data text.jsonl.xz \
        --tokenizer t5/ --out packages/recurrent_transformer/results/nvidia-h200
    python packages/recurrent_transformer/experiments/train_gpus.py --out DIR --dry-run

Writes train_gpus.json, from the logs of the trainings. The criterion, written before the run: on
two GPUs, each with half of the paper's batch, a model trains at 1.85 times the speed of one.
"""

import sys
from itertools import product

from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.gpus import time_trainings
from mezzo_recurrent_transformer.recipes import PAPER_NAMES, recipe, with_layers

NAME = PAPER_NAMES["recurrent"]
SETTINGS = {"1 GPU": 1, "2 GPUs": 2}
"""How many processes train."""
ROWS = {
    f"{with_layers(NAME, layers)}, {setting}": (layers, setting)
    for layers, setting in product((6, 12), SETTINGS)
}


def measure(options: Options) -> None:
    """Train each model on the GPUs that this machine has."""
    rows = {
        name: (
            recipe("tiny" if options.dry_run else f"300m_{layers}", "recurrent"),
            SETTINGS[setting],
        )
        for name, (layers, setting) in ROWS.items()
    }
    time_trainings(options, rows, "262,144 tokens (300M weights)")


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(ROWS), trains=True))
