"""Train the paper's 200M recipes on one GPU, for 64 steps: speed, memory and loss.

    python packages/rat/experiments/train_200m.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/train_200m.py --out DIR --dry-run      # toy sizes, on a CPU

Width, depth, T and optimizer are the recipes'. A step has 131,072 tokens instead of 1,048,576, that
is an eighth of the micro-batches. Writes train_200m.json.
"""

import sys
from dataclasses import replace
from typing import Any

from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.processes import share_of_peak
from mezzo_core.bench.training import WARMUP, in_words, measure_run
from mezzo_core.data import DataConfig
from mezzo_core.train.config import TrainConfig
from mezzo_rat.recipes import PAPER_NAMES, paper_200m, train_config

NAMES = {PAPER_NAMES[name]: name for name in ("rnn", "rat_l64", "rat_l16", "attention")}
PAPER = paper_200m(8192)
SHORT = replace(PAPER, steps=64, batch_size=16, eval_every=64, eval_batches=None)
TOY = {"vocab_size": 257, "d_model": 32, "num_layers": 2, "head_dim": 8, "seq_len": 128}
DRY = replace(SHORT, **TOY, steps=WARMUP + 2, eval_batches=1, compile=False)
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
    every = {m: train_config(f"200m_{name}", shared, name) for m, name in NAMES.items()}
    first, where = every[options.models[0]], origin(options.device)
    header = Header(
        kind="training",
        title="Short trainings of the paper's 200M recipes",
        setting=f"the 200M recipes: {in_words(first, options.device)}; micro-batches of "
        f"{first.micro_batch_size} sequences; speed: median after {WARMUP} steps; peak: the data "
        "sheet's, at 3 times the forward's FLOPs",
        how="scaled down",
        columns=COLUMNS,
        models=tuple(NAMES),
        unit="",
        better="lower",
    )
    result = Result(options.out / "train_200m.json", header, where, say)
    for model in options.models:
        if not result.has(model, COLUMNS[-1]):
            found = measure_run(every[model], options.runs / "train_200m", options.device)
            add(result, model, every[model], found, where["gpu"])


def add(
    result: Result, model: str, config: TrainConfig, found: dict[str, Any], gpu: str | None
) -> None:
    """Add what came of a training, column by column; `gpu` is the GPU's name."""
    speed, loss = found["tokens_per_second"], found["steps"]["train"][-1][1]
    hours = PAPER.steps * PAPER.batch_size * PAPER.seq_len / speed / 3600
    share = share_of_peak(config, speed, gpu)
    values = (hours, share, found["seconds_to_first_step"], loss, found["perplexity"])
    names = ("parameters", "tokens_per_second", "peak_gb", "steps")
    details = {name: found[name] for name in names}
    for column, value in zip(COLUMNS, values, strict=True):
        if value is not None and not result.has(model, column):
            result.add(value, model=model, column=column, **details)
            details = {}


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(NAMES), trains=True))
