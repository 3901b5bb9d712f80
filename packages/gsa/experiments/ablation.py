"""Train Table 2's rows, and those beside it, at a small size: each at its best learning rate.

    python packages/gsa/experiments/ablation.py --data 'texts/*.jsonl.xz' --tokenizer gpt2/ \
        --jobs 16 --seeds 0 1 2 3 4 5 --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/ablation.py --dry-run --out DIR       # toy size, on a CPU

The paper trains 340M weights on 10B tokens; these are 34M weights and 25M tokens, in many small
steps. Seed 0 takes three rates, and a further one where the best of a row is the lowest or the
highest so far; the other seeds take the row's best. The rows beside Table 2 show what it depends
on: ABC as in the authors' program (the text has neither its running average nor its scale), and GSA
whose slots start with memories of 2 to 2048 tokens (`GSAConfig.gate_spans`), as constant gates
always do. The others are Table 1's models, with states of 128 (HGRN2, as GSA), 192 (GLA) and 256
(RetNet) numbers a channel of a layer. It writes ablation_rates.json.
"""

import sys
from dataclasses import replace

from mezzo_core.data import DataConfig
from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.training import in_words
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_gsa.recipes import ABLATION, PAPER_NAMES, Hyperparameters, tiny, train_config
from mezzo_gsa.reproduction.claims import ABC_CODE

TABLE_1 = {name: PAPER_NAMES[name] for name in ("attention", "retnet", "gla", "hgrn2")}
NAMES = ABLATION | {"abc_code": ABC_CODE, "gsa_spread": "GSA, slots started apart"} | TABLE_1
"""The name of each row, by the recipe's."""
RATES = {"3.75e-4": 3.75e-4, "7.5e-4": 7.5e-4, "1.5e-3": 1.5e-3, "3e-3": 3e-3, "6e-3": 6e-3}
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
    batch_size=8,
    steps=3000,
    data=DataConfig(),
    optim=OptimConfig(lr=1.5e-3, min_lr=1.5e-4, warmup_fraction=0.1, weight_decay=0.01),
    eval_every=10**9,
    checkpoint_every=10**9,
    compile=True,
)
"""14M weights in the blocks, 19M in the embedding, which the head shares."""
TOY_SIZES = {"d_model": 32, "num_layers": 2, "num_slots": 64, "key_width": 16}
TOY = replace(tiny(), **TOY_SIZES, seq_len=64, batch_size=2, eval_batches=2, steps=2)


def measure(options: Options) -> None:
    """Sweep every row's rate with seed 0, then train each at its best with the other seeds."""
    options.sweep(
        "ablation_rates",
        {row: configure(name, options) for name, row in NAMES.items()},
        RATES,
        title="Table 2 at a small size, each row at its best learning rate",
        setting=f"{in_words(configure('gsa', options), options.device)}, here one for each column, "
        "falling to a tenth; seed 0 at the three in the middle and at the next ones while a row's "
        "best is at an end, the other seeds at the row's best",
    )


def configure(name: str, options: Options) -> TrainConfig:
    """Return the run of one row, on the given text."""
    hyperparameters = replace(TOY if options.dry_run else SMALL, data=options.text)
    config = train_config(f"ablation_{name}", hyperparameters, name)
    # The head is tied to the embedding: so few tokens cannot train another matrix.
    return replace(config, model=replace(config.model, tie_embeddings=True))


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, [*NAMES.values()], trains=True, parallel=True))
