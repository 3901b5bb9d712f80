"""Train the six architectures of the main comparison on the same tokens on one GPU.

    python packages/rat/experiments/train_six.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200
    python packages/rat/experiments/train_six.py --out DIR --dry-run      # toy size, on a CPU

Writes train_six_bpe.json. The committed one has GPT-2 tokens and five passes over six novels,
Shakespeare and the presidents' addresses.
"""

import sys
from dataclasses import replace

from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.training import in_words, train_models
from mezzo_core.data import DataConfig
from mezzo_rat.recipes import PAPER_NAMES, mid, tiny, train_config

BPE = replace(mid(), steps=375, eval_every=75, checkpoint_every=10**9, compile=True)
DRY = replace(tiny(), seq_len=64, batch_size=2, steps=2, eval_every=1, eval_batches=1)
MODELS = tuple(PAPER_NAMES.values())


def measure(options: Options) -> None:
    """Train each model once with each seed."""
    data = DataConfig(source=options.data, tokenizer=options.tokenizer)
    shared = replace(DRY if options.dry_run else BPE, data=data)
    every = {m: train_config(f"bpe_{name}", shared, name) for name, m in PAPER_NAMES.items()}
    header = Header(
        kind="training",
        title="The six architectures of the main comparison, trained alike",
        setting=in_words(every[MODELS[0]], options.device),
        how="scaled down",
        columns=("Val. PPL",),
        models=MODELS,
        unit="perplexity",
        better="lower",
    )
    result = Result(options.out / "train_six_bpe.json", header, origin(options.device), say)
    wanted = {model: every[model] for model in options.models}
    folder = options.runs / "train_six"
    train_models(result, wanted, options.seeds, folder, options.device, options.jobs)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, MODELS, trains=True, parallel=True))
