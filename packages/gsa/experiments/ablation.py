"""Train Table 2's rows and two more at a small size, all on the same tokens, on one GPU.

    python packages/gsa/experiments/ablation.py --data 'texts/*.jsonl.xz' --tokenizer gpt2/ \
        --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/ablation.py --dry-run --out DIR       # toy size, on a CPU

The paper trains 340M weights on 10B tokens; these are 34M weights and 26M tokens. The two further
rows are attention, and GSA whose slots start with memories of 2 to 2048 tokens
(`GSAConfig.gate_spans`), as constant gates always do.
"""

import sys
from dataclasses import replace

from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.training import in_words, train_models
from mezzo_core.data import DataConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_gsa.claims import REPRODUCTION
from mezzo_gsa.recipes import ABLATION, PAPER_NAMES, Hyperparameters, tiny, train_config

COLUMNS = REPRODUCTION.published.table("gsa.table2").columns
OTHERS = {"gsa_spread": "GSA, slots started apart", "attention": PAPER_NAMES["attention"]}
NAMES = ABLATION | OTHERS
"""The paper's name for each row, by the recipe's, and two rows that are not in the paper."""
SMALL = Hyperparameters(
    vocab_size=50_257,
    d_model=384,
    num_layers=8,
    num_heads=3,  # of width 128: kernels are made for powers of two
    num_slots=64,
    key_width=128,
    hgrn2_width=128,
    attention_width=64,
    seq_len=1024,
    batch_size=64,
    micro_batch_size=32,
    steps=400,
    data=DataConfig(),
    # A fifth of these few steps is warm-up. With less, attention overshoots most of all.
    optim=OptimConfig(lr=1.5e-3, min_lr=1.5e-4, warmup_fraction=0.2, weight_decay=0.01),
    eval_every=10**9,
    checkpoint_every=10**9,
    compile=True,
)
"""14M weights in the blocks, 19M in the embedding, which the head shares."""
TOY_SIZES = {"d_model": 32, "num_layers": 2, "num_slots": 64, "seq_len": 64, "batch_size": 2}
TOY = replace(tiny(), **TOY_SIZES, eval_batches=2, steps=2)


def measure(options: Options) -> None:
    """Train one row after another, seed by seed."""
    configs = {NAMES[name]: configure(name, options) for name in options.models}
    title, names = "Table 2: ablation study, at a small size", tuple(NAMES.values())
    words = in_words(configure("gsa", options), options.device)
    header = Header("training", title, words, "scaled down", COLUMNS, names, "perplexity", "lower")
    result = Result(options.out / "ablation.json", header, origin(options.device), say)
    train_models(result, configs, options.seeds, options.runs, options.device, options.jobs)


def configure(name: str, options: Options) -> TrainConfig:
    """Return the run of one row, on the given text."""
    data = DataConfig(source=options.data, tokenizer=options.tokenizer)
    hyperparameters = replace(TOY if options.dry_run else SMALL, data=data)
    config = train_config(f"ablation_{name}", hyperparameters, name)
    # The head is tied to the embedding: so few tokens cannot train another matrix.
    return replace(config, model=replace(config.model, tie_embeddings=True))


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, list(NAMES), trains=True, parallel=True))
