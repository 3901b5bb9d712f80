"""Train the paper's 200M recipes on one GPU, for 64 steps: speed, memory and loss.

    python packages/rat/experiments/train_200m.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/train_200m.py --out DIR --dry-run      # toy sizes, on a CPU

Width, depth, T and optimizer are the recipes'. A step has 131,072 tokens instead of 1,048,576, that
is an eighth of the micro-batches. Writes train_200m.json.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.gpus import has_known_peak, share_of_peak
from mezzo_core.reproduction.training import WARMUP, in_words, trainings
from mezzo_core.train.config import TrainConfig
from mezzo_rat.recipes import PAPER_NAMES, paper_200m, train_config

NAMES = {PAPER_NAMES[name]: name for name in ("rnn", "rat_l64", "rat_l16", "attention")}
PAPER = paper_200m(8192)
SHORT = replace(PAPER, steps=64, batch_size=16, eval_every=64, eval_batches=None)
TOY = {"vocab_size": 257, "d_model": 32, "num_layers": 2, "head_dim": 8, "seq_len": 128}
DRY = replace(SHORT, **TOY, steps=WARMUP + 2, eval_batches=1, compile=False)
"""The same form at a size that a CPU trains in seconds."""
HOURS, SHARE, FIRST = "Hours on one GPU for 15B tokens", "% of bf16 peak", "s to the first step"
COLUMNS = (HOURS, SHARE, FIRST, "Train. loss", "Val. PPL")


def measure(options: Options) -> None:
    """Train one model after another, each with the first seed."""
    shared = replace(DRY if options.dry_run else SHORT, data=options.text)
    configs = {m: train_config(f"200m_{name}", shared, name) for m, name in NAMES.items()}
    first = next(iter(configs.values()))
    columns = [c for c in COLUMNS if c != SHARE or has_known_peak(options.device)]
    options.run(
        "train_200m",
        trainings(configs, columns, options.seeds[:1], speeds),
        title="Short trainings of the paper's 200M recipes",
        setting=f"the 200M recipes: {in_words(first, options.device)}; micro-batches of "
        f"{first.micro_batch_size} sequences; speed: median after {WARMUP} steps; peak: the data "
        "sheet's, at 3 times the forward's FLOPs",
        columns=COLUMNS,
        unit="",
    )


def speeds(
    config: TrainConfig, found: dict[str, Any], folder: Path, device: torch.device
) -> Mapping[str, float]:
    """Return what came of a training, but for the perplexity."""
    speed = found["tokens_per_second"]
    return {
        HOURS: PAPER.steps * PAPER.batch_size * PAPER.seq_len / speed / 3600,
        SHARE: share_of_peak(config, speed, device),
        FIRST: found["seconds_to_first_step"],
        "Train. loss": found["steps"]["train"][-1][1],
    }


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(NAMES), trains=True))
