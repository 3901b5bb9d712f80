"""Train the paper's models for a few steps on one GPU and on two: speed, memory, loss.

    python packages/gsa/experiments/train_gpus.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/train_gpus.py --out DIR --dry-run      # toy sizes, on a CPU

Writes train_gpus.json.
"""

import sys
from itertools import product

from mezzo_core.reproduction.gpus import run_settings
from mezzo_gsa.recipes import PAPER_NAMES, recipe

MODELS = {
    f"{PAPER_NAMES[architecture]}, {size}": (size, architecture)
    for size, architecture in product(("340m", "1p3b"), ("gsa", "attention"))
}

if __name__ == "__main__":
    sys.exit(run_settings(__doc__, MODELS, recipe))
