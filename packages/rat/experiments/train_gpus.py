"""Train the paper's models for a few steps on one GPU and on two: speed, memory, loss.

    python packages/rat/experiments/train_gpus.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/train_gpus.py --out DIR --dry-run      # toy sizes, on a CPU

Writes train_gpus.json, from the logs of the trainings.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import torch
from mezzo_core.data import load_tokenizer
from mezzo_core.reproduction import Cell, Entry, Options, run_script, say
from mezzo_core.reproduction.gpus import has_known_peak, run_processes, share_of_peak
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.training import WARMUP, measure_run
from mezzo_rat.recipes import PAPER_NAMES, recipe

SETTINGS = {"1 GPU": 1, "2 GPUs": 2, "1 GPU, activations computed again": 1}
"""How many processes train."""
ROWS = {
    f"{PAPER_NAMES[architecture]}, {size}, {setting}": (size, architecture, setting)
    for size, architecture, setting in product(("200m", "1p3b"), ("rat_l16", "attention"), SETTINGS)
}
COLUMNS = ("tokens/s", "% of bf16 peak", "peak GB of a GPU", "Train. loss")
STEPS, TOKENS = 2 * WARMUP, 131_072
"""Of each training, and of a step."""


def measure(options: Options) -> None:
    """Train each model in the settings for which this machine has GPUs."""
    most = max(1, torch.cuda.device_count())
    fit = [row for row, (*_, setting) in ROWS.items() if SETTINGS[setting] <= most]
    for row in options.models:
        if row not in fit:
            say(f"{row}: not measured, with {most} GPUs")
    columns = COLUMNS if has_known_peak(options.device) else (COLUMNS[0], COLUMNS[-1])
    options.run(
        "train_gpus",
        [Job(tuple(Cell(r, c) for c in columns), partial(train, r, options)) for r in fit],
        title="Whole models on one GPU and on two",
        setting=f"{STEPS} steps of {TOKENS:,} tokens by the recipes, but for the vocabulary, which "
        f"is that of {Path(options.tokenizer).name}; bf16 autocast over float32, layers and loss "
        f"compiled; speed: of all GPUs, median after {WARMUP} steps; the peak is the data sheet's, "
        "at 3 times the forward's FLOPs",
        how="scaled down" if options.dry_run else "other hardware",
        columns=COLUMNS,
        models=tuple(ROWS),
        unit="",
        better="higher",
    )


def train(
    row: str, options: Options, cells: tuple[Cell, ...], folder: Path, _: object
) -> Iterator[list[Entry]]:
    """Train a recipe for a few steps on the given text."""
    size, architecture, setting = ROWS[row]
    config = recipe("tiny" if options.dry_run else size, architecture)
    T, steps = (16, 2) if options.dry_run else (config.seq_len, STEPS)
    config = replace(
        config,
        model=replace(config.model, vocab_size=load_tokenizer(options.tokenizer).vocab_size),
        data=options.text,
        seq_len=T,
        batch_size=2 if options.dry_run else TOKENS // T,
        steps=steps,
        eval_every=steps,
        eval_batches=1,
        checkpoint_every=steps,
        activation_checkpointing="again" in setting,
    )
    count, device = SETTINGS[setting], torch.device(options.device.type)
    found = run_processes(count, measure_run, config, folder, device)
    speed, loss = found[0]["tokens_per_second"], found[0]["steps"]["train"][-1][1]
    share = share_of_peak(config, speed / count, device)
    peak = max(each["peak_gb"] or 0 for each in found.values())
    told = dict(zip(COLUMNS, (speed, share, peak, loss), strict=True))
    yield [cell.entry(told[cell.column]) for cell in cells]


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(ROWS), trains=True))
