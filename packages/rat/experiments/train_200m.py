"""Train the paper's 200M recipes on one GPU, for 64 steps: speed, memory and loss.

    python packages/rat/experiments/train_200m.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/train_200m.py --out DIR --dry-run      # toy sizes, on a CPU

Width, depth, T and optimizer are the recipes'. A step has 131,072 tokens instead of 1,048,576, that
is an eighth of the micro-batches. Writes train_200m.json.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.training import WARMUP, measure_run
from mezzo_core.data import DataConfig
from mezzo_core.train.config import TrainConfig
from mezzo_rat.recipes import PAPER_NAMES, paper_200m, train_config

NAMES = {PAPER_NAMES[name]: name for name in ("rnn", "rat_l64", "rat_l16", "attention")}
PEAK_FLOPS = {"NVIDIA H200": 989e12}
"""Dense bf16 FLOP/s in the GPU's data sheet."""
PAPER = paper_200m(8192)
SHORT = replace(
    PAPER, steps=64, batch_size=16, eval_every=64, eval_batches=None, checkpoint_every=64
)
DRY = replace(
    SHORT,
    vocab_size=257,
    d_model=32,
    num_layers=2,
    head_dim=8,
    seq_len=128,
    steps=WARMUP + 2,
    eval_batches=1,
    compile=False,
)
"""The same form at a size that a CPU trains in seconds."""
COLUMNS = (
    "Hours on one GPU for 15B tokens",
    "% of bf16 peak",
    "s to the first step",
    "Train. loss",
    "Val. PPL",
)


def measure(options: Options) -> None:
    """Train one model after another, each with the first seed."""
    data = DataConfig(source=options.data, tokenizer=options.tokenizer)
    shared = replace(DRY if options.dry_run else SHORT, data=data)
    where = origin(options.device)
    per_step = shared.batch_size * shared.seq_len
    header = Header(
        kind="training",
        title="Short trainings of the paper's 200M recipes",
        setting=f"the 200M recipes for {shared.steps} steps: C {shared.d_model}, "
        f"{shared.num_layers} layers, T {shared.seq_len}, {per_step:,} tokens a step in "
        f"micro-batches of {shared.micro_batch_size * shared.seq_len:,} "
        f"({shared.steps * per_step:,} tokens of {Path(data.source).name}, tokenizer "
        f"{Path(data.tokenizer).name}), warm-up {shared.optim.warmup_fraction:.0%} of the steps, "
        f"{'fp32, eager' if options.dry_run else 'bf16 autocast, torch.compile'}; speed: median "
        f"after {WARMUP} steps; peak: the data sheet's, at 3 times the forward's FLOPs",
        how="scaled down",
        columns=COLUMNS,
        models=tuple(NAMES),
        unit="",
        better="lower",
    )
    result = Result(options.out / "train_200m.json", header, where, say)
    for model in options.models:
        config = train_config(f"200m_{NAMES[model]}", shared, NAMES[model])
        if not result.has(model, COLUMNS[-1]):
            found = measure_run(config, options.runs / "train_200m", options.device)
            add(result, model, config, found, PEAK_FLOPS.get(where["gpu"] or ""))


def add(
    result: Result, model: str, config: TrainConfig, found: dict[str, Any], peak: float | None
) -> None:
    """Add what came of a training, column by column; `peak` is the GPU's FLOP/s, if known."""
    speed, loss = found["tokens_per_second"], found["steps"]["train"][-1][1]
    with torch.device("meta"):
        flops = 3 * config.model.build().flops_per_token(config.seq_len) * speed
    hours = PAPER.steps * PAPER.batch_size * PAPER.seq_len / speed / 3600
    share = None if peak is None else 100 * flops / peak
    values = (hours, share, found["seconds_to_first_step"], loss, found["perplexity"])
    names = ("parameters", "tokens_per_second", "peak_gb", "steps")
    details = {name: found[name] for name in names}
    for column, value in zip(COLUMNS, values, strict=True):
        if value is not None and not result.has(model, column):
            result.add(value, model=model, column=column, **details)
            details = {}


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(NAMES), trains=True))
