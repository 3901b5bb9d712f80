"""Train the six architectures of the main comparison, each at its best learning rate.

    python packages/rat/experiments/train_six.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200 --jobs 8
    python packages/rat/experiments/train_six.py --out DIR --dry-run      # toy size, on a CPU

Writes train_six.json: 92M weights, 3,000 steps of 8 sequences of 1,024 tokens. Seed 0 trains each
model at three learning rates, the other seeds at its best. Three more models tell an architecture
from its start: the RNN and RAT(L=64) with gates that remember as few tokens as those of RAT(L=16),
and attention with ALiBi, which prefers near tokens from the start.
"""

import sys
from dataclasses import replace

from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.training import in_words
from mezzo_core.train.config import OptimConfig
from mezzo_rat.recipes import PAPER_NAMES, SHORT_RUN, mid, tiny, train_config
from mezzo_rat.reproduction.claims import STARTED

MODELS = {model: name for name, model in PAPER_NAMES.items()}
MODELS |= {f"RNN{STARTED}": "rnn_span16", f"RAT(L=64){STARTED}": "rat_l64_span16"}
MODELS |= {"Attention, ALiBi": "attention_alibi"}
RATES = {"5e-4": 5e-4, "1e-3": 1e-3, "2e-3": 2e-3}
OPTIM = OptimConfig(lr=1e-3, min_lr=1e-4, warmup_fraction=SHORT_RUN)
FULL = replace(
    mid(),
    optim=OPTIM,
    batch_size=8,
    micro_batch_size=None,
    steps=3000,
    eval_every=500,
    checkpoint_every=10**9,
    compile=True,
)
DRY = replace(tiny(), optim=OPTIM, seq_len=64, batch_size=2, steps=2, eval_batches=1)


def measure(options: Options) -> None:
    """Train each model at each rate, then with the other seeds at its best."""
    shared = replace(DRY if options.dry_run else FULL, data=options.text)
    configs = {m: train_config(f"six_{name}", shared, name) for m, name in MODELS.items()}
    words = in_words(next(iter(configs.values())), options.device)
    options.sweep(
        "train_six",
        configs,
        RATES,
        title="The six architectures of the main comparison, at three learning rates",
        setting=f"{words}; here the rate is the column's, and a tenth of it at the end",
    )


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(MODELS), trains=True, parallel=True))
