"""Train DRT, its ablations and plain window models on long documents, at a small size (Table 1).

    python packages/drt/experiments/train_documents.py --data 'texts/*.jsonl' --tokenizer byte \
        --out packages/drt/results/nvidia-h100 --jobs 12
    python packages/drt/experiments/train_documents.py --out DIR --dry-run

Writes long_documents_TOKENIZER_rates.json: each model's perplexity at several learning rates, with
one seed. Then writes long_documents_TOKENIZER.json: at its best rate, perplexities in windows of
half, once and four times the tokens of the training. `--models` takes some alone, `--jobs 12`
trains twelve at the same time, over all GPUs. The small recipes compare landmarks as the paper's
released code does; one model here does it as its text says, by projections
(`DRTConfig.projections`).
"""

import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

from mezzo_core.data import load_tokenizer
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.eval.sliding import sliding_windows
from mezzo_core.nn import LM
from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.training import SWEPT, at_rate, in_words, of_model, trainings
from mezzo_core.train.config import TrainConfig
from mezzo_drt import DRTConfig
from mezzo_drt.recipes import PAPER_NAMES, RECIPES

OURS = "fixed"  # is not in the paper's table
PROJECTED = f"{PAPER_NAMES['drt1']}, projected"
MODELS = {name: recipe for recipe, name in PAPER_NAMES.items() if recipe != OURS}
MODELS[PROJECTED] = "drt1"
TRAINED_AT = 4096
LENGTHS = {"2048": 2048, "4096": TRAINED_AT, "16384": 16_384}
ROW = 4
"""Tokens of an evaluated row, in windows of the longest length."""
STEPS, BATCH = 4800, 2
"""39M tokens. A text should have half of that or more, so that it is read twice at most."""
RATES = {"5e-4": 5e-4, "1e-3": 1e-3, "2e-3": 2e-3, "4e-3": 4e-3}
"""About the paper's, 2e-3."""
WARMUP = 0.1
"""Of the steps. The paper's 2% would be 48 steps here, while gradients are still large."""
TOY = 64  # a dry run has this many times fewer tokens in a window


def measure(options: Options) -> None:
    """Find the best rate of each model, then train it with each seed, the first seed first."""
    example = configure("base", options)
    told = f"{in_words(example, options.device)}, but for the rate"
    landmarks = (
        "landmarks compared as by the paper's released code, without projections; projected: as by "
        "its text"
    )
    name = f"long_documents_{Path(options.tokenizer).name}"
    configs = {model: configure(recipe, options) for model, recipe in MODELS.items()}
    configs[PROJECTED] = projected(configs[PROJECTED])
    rates = options.sweep(
        f"{name}_rates",
        configs,
        RATES,
        (SWEPT,),
        title="Perplexity on long documents, by the learning rate",
        setting=f"{told}; {landmarks}",
    )
    best = {model: rates.best_column(model, seed=SWEPT) for model in configs}
    chosen = {model: at_rate(configs[model], RATES[rate]) for model, rate in best.items() if rate}
    lengths = {name: T // (TOY if options.dry_run else 1) for name, T in LENGTHS.items()}
    tokens = ", ".join(map(str, lengths.values()))
    test = partial(of_model, partial(perplexities, lengths=lengths))
    options.run(
        name,
        trainings(chosen, [*LENGTHS], options.seeds, test),
        title="Perplexity on long documents, by the length of the evaluation",
        setting=f"{told}, each model's best of {', '.join(RATES)} with seed {SWEPT}; evaluated in "
        f"windows of {tokens} tokens that overlap by half, with the same targets; {landmarks}",
        models=tuple(MODELS),
    )


def perplexities(model: LM, config: TrainConfig, *, lengths: Mapping[str, int]) -> dict[str, float]:
    """Evaluate the model of a run in windows of each length, by their names.

    All lengths have the same targets. A window begins half its length after the one before, so that
    but for the first tokens of a row, at least half a window is before each target.
    """
    text, found = config.data.build(ROW * max(lengths.values()), token_store()), {}
    for name, T in lengths.items():
        rows = islice(text.validation_batches(ROW), config.eval_batches)
        windows = (window for batch in rows for window in sliding_windows(batch, T, T // 2))
        found[name] = evaluate(model, windows, precision=config.precision).perplexity
    return found


def configure(architecture: str, options: Options) -> TrainConfig:
    """Return the run of one model on the given text; in a dry run at a toy size."""
    if options.dry_run:
        recipe = RECIPES[f"tiny_{architecture}"]()
        toy = TRAINED_AT // TOY
        return replace(
            recipe, data=options.text, seq_len=toy, batch_size=2, steps=2, eval_batches=1
        )
    recipe = RECIPES[f"small_{architecture}"]()
    vocab_size = load_tokenizer(options.tokenizer).vocab_size
    return replace(
        recipe,
        model=replace(recipe.model, vocab_size=vocab_size),
        data=options.text,
        batch_size=BATCH,
        steps=STEPS,
        optim=replace(recipe.optim, warmup_fraction=WARMUP),
        eval_every=300,
        checkpoint_every=10**9,
    )


def projected(config: TrainConfig) -> TrainConfig:
    """Return the run of DRT that projects landmarks before it compares them."""
    stack = config.model.stack
    assert isinstance(stack, DRTConfig)
    return replace(config, model=replace(config.model, stack=replace(stack, projections=True)))


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(MODELS), trains=True, parallel=True))
