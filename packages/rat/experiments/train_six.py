"""Train the six architectures of the main comparison on the same tokens on one GPU.

    python packages/rat/experiments/train_six.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/train_six.py --out DIR --dry-run      # toy size, on a CPU

Writes train_six_bpe.json. The committed one has GPT-2 tokens and five passes over six novels,
Shakespeare and the presidents' addresses.
"""

import sys
from dataclasses import replace
from pathlib import Path

from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.training import train_models
from mezzo_core.data import DataConfig
from mezzo_rat.recipes import PAPER_NAMES, mid, tiny, train_config

BPE = replace(mid(), steps=375, eval_every=75, checkpoint_every=10**9, compile=True)
DRY = replace(tiny(), seq_len=64, batch_size=2, steps=2, eval_every=1, eval_batches=1)


def measure(options: Options) -> None:
    """Train each model once with each seed."""
    data = DataConfig(source=options.data, tokenizer=options.tokenizer)
    shared = replace(DRY if options.dry_run else BPE, data=data)
    configs = {
        model: train_config(f"bpe_{name}", shared, name)
        for name, model in PAPER_NAMES.items()
        if model in options.models
    }
    optim, tokens = shared.optim, shared.steps * shared.batch_size * shared.seq_len
    header = Header(
        kind="training",
        title="The six architectures of the main comparison, trained alike",
        setting=f"C {shared.d_model}, {shared.num_layers} layers, T {shared.seq_len}, "
        f"{shared.steps} steps of {shared.batch_size} sequences ({tokens:,} tokens of "
        f"{Path(data.source).name}, tokenizer {Path(data.tokenizer).name}), lr {optim.lr:g}, "
        f"warm-up {optim.warmup_fraction:.0%} of the steps, "
        f"{'fp32, eager' if options.dry_run else 'bf16 autocast, torch.compile'}",
        how="scaled down",
        columns=("Val. PPL",),
        models=tuple(PAPER_NAMES.values()),
        unit="perplexity",
        better="lower",
    )
    where = origin(options.device)
    result = Result(options.out / "train_six_bpe.json", header, where, say)
    train_models(result, configs, options.seeds, options.runs / "train_six", options.device)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(PAPER_NAMES.values()), trains=True))
