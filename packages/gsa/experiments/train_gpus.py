"""Train the paper's models for a few steps on one GPU and on two: speed, memory, loss.

    python packages/gsa/experiments/train_gpus.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/train_gpus.py --out DIR --dry-run      # toy sizes, on a CPU

Writes train_gpus.json.
"""

import sys

from mezzo_core.bench import Options, run_script
from mezzo_core.bench.processes import measure_settings
from mezzo_gsa.recipes import PAPER_NAMES, recipe

MODELS = {
    f"{PAPER_NAMES[architecture]}, {size}": (size, architecture)
    for size in ("340m", "1p3b")
    for architecture in ("gsa", "attention")
}


def measure(options: Options) -> None:
    """Train one model after another."""
    names = (("tiny", name) if options.dry_run else (size, name) for size, name in MODELS.values())
    measure_settings(options, dict(zip(MODELS, (recipe(*each) for each in names), strict=True)))


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(MODELS), trains=True))
