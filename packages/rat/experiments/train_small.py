"""Train what the paper compares beside its main models, at a small size and at several lengths.

    python packages/rat/experiments/train_small.py --data books.jsonl.xz --tokenizer gpt2/ \
        --out packages/rat/results/nvidia-h200 --jobs 12
    python packages/rat/experiments/train_small.py --out DIR --dry-run      # toy size, on a CPU

All models have 41M weights and 3,000 steps of 8,192 tokens. Writes three files:

- train_contexts.json: RAT, its ablations, RAT-Reversed, attention and the RNN, each trained at
  T = 1,024, 2,048 and 4,096 (Table 9, Figure 4; 30 trainings with each seed);
- train_long.json: the models of Table 11, at T = 4,096 with a RoPE base of 500,000 (5);
- train_positions.json: hybrids with and without RoPE and the RNN, trained at T = 1,024 and tested
  from half to four times that length (Table 10, Figure 6; 5).

A seed is 40 trainings of 25M tokens, and most of them compile anew. To take fewer, name fewer
`--models`.
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import chain

from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.training import in_words, loss_by_length, of_model, trainings
from mezzo_core.train.config import TrainConfig
from mezzo_rat.recipes import PAPER_NAMES, small, tiny, train_config
from mezzo_rat.reproduction.claims import FULL_QK, NOPE, STARTED, TOKEN_ROPE

SIX = {model: name for name, model in PAPER_NAMES.items()}
IN_CONTEXTS = {
    "RNN": "rnn",
    f"RNN{STARTED}": "rnn_span16",
    "RAT(L=128)": "rat_l128",
    "RAT(L=64)": "rat_l64",
    FULL_QK: "rat_l64_full_qk",
    TOKEN_ROPE: "rat_l64_token_rope",
    **{f"RAT-Reversed(C={count})": f"reversed_c{count}" for count in (128, 64, 16)},
    "Attention": "attention",
}
IN_LONG = {model: name for model, name in SIX.items() if model != "RAT(L=64)"}
IN_POSITIONS = {model: SIX[model] for model in ("RNN", "Attention-SWA", "RAT(L=16)-SWA")}
IN_POSITIONS |= {f"{m}{NOPE}": f"{n}_nope" for m, n in IN_POSITIONS.items() if m != "RNN"}
MODELS = tuple(dict.fromkeys((*IN_CONTEXTS, *IN_LONG, *IN_POSITIONS)))
TRAINED_AT = {f"T={T}": T for T in (1024, 2048, 4096)}
TESTED_AT = {f"T={T}": T for T in (512, 1024, 2048, 4096)}
TOKENS = 8192
"""Tokens of a step."""
FULL = replace(
    small(),
    micro_batch_size=None,
    steps=3000,
    eval_every=1000,
    checkpoint_every=10**9,
    compile=True,
)
DRY = replace(tiny(), d_model=32, num_layers=2, head_dim=8, steps=2, eval_every=2, eval_batches=1)
TOY = 8  # a dry run has this many times fewer tokens in a sequence


def measure(options: Options) -> None:
    """Train the models of each file with each seed."""
    by_column = {c: configure(IN_CONTEXTS, T, options) for c, T in TRAINED_AT.items()}
    title = "RAT, its ablations and RAT-Reversed by the training context, at equal tokens a step"
    jobs = chain.from_iterable(trainings(each, [c], options.seeds) for c, each in by_column.items())
    jobs = sorted(jobs, key=lambda job: job.cells[0].seed)
    setting = words(by_column["T=1024"], options)
    options.run("train_contexts", jobs, title=title, setting=setting)

    long = configure(IN_LONG, 4096, options, rope_base=500_000.0)
    title = "A longer context, with a RoPE base of 500,000"
    jobs = trainings(long, ["Val."], options.seeds)
    options.run("train_long", jobs, title=title, setting=words(long, options))

    configs = configure(IN_POSITIONS, 1024, options)
    lengths = {c: T // TOY if options.dry_run else T for c, T in TESTED_AT.items()}
    test = partial(loss_by_length, lengths=lengths, windows=1 if options.dry_run else None)
    options.run(
        "train_positions",
        trainings(configs, [*TESTED_AT], options.seeds, partial(of_model, test)),
        title="Loss by the length of the test, with and without RoPE",
        setting=words(configs, options),
        unit="nats a token",
    )


def configure(
    models: Mapping[str, str], T: int, options: Options, rope_base: float = 10_000.0
) -> dict[str, TrainConfig]:
    """Return the runs of models at a context; in a dry run at a toy size."""
    shared = replace(
        DRY if options.dry_run else FULL,
        data=options.text,
        seq_len=T // TOY if options.dry_run else T,
        batch_size=TOKENS // T,
        rope_base=rope_base,
    )
    return {m: train_config(f"small_{name}", shared, name) for m, name in models.items()}


def words(configs: Mapping[str, TrainConfig], options: Options) -> str:
    """Return the setting of a result: that of the first run."""
    return in_words(next(iter(configs.values())), options.device)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, MODELS, trains=True, parallel=True))
