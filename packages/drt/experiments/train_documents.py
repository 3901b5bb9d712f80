"""Train DRT, its ablations and plain window models on long documents, at a small size (Table 1).

    python packages/drt/experiments/train_documents.py --data books.jsonl --tokenizer gpt2/ \
        --out packages/drt/results/nvidia-h200 --jobs 8
    python packages/drt/experiments/train_documents.py --out DIR --dry-run

Writes long_documents.json: perplexities in windows of half, once and four times the tokens of the
training. `--models` takes some alone, `--jobs 8` trains eight at the same time, over all GPUs. The
small recipes compare landmarks as the paper's released code does; one model here does it as its
text says, by projections (`DRTConfig.projections`).
"""

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.tested import train_and_test
from mezzo_core.bench.training import in_words
from mezzo_core.data import DataConfig
from mezzo_core.train.config import TrainConfig
from mezzo_drt import DRTConfig
from mezzo_drt.claims import DOCUMENTS, DRT1, LONG, SHORT, TRAINED_AT
from mezzo_drt.documents import perplexities
from mezzo_drt.recipes import PAPER_NAMES, RECIPES

OURS = ("fixed", "outside")  # are not in the paper's table
PROJECTED = f"{DRT1}, projected"
MODELS = {name: recipe for recipe, name in PAPER_NAMES.items() if recipe not in OURS}
MODELS[PROJECTED] = "drt1"
LENGTHS = (SHORT, TRAINED_AT, LONG)
STEPS, BATCH = 2400, 2
"""Four epochs of five million tokens."""
TOY = 64  # a dry run has this many times fewer tokens in a window


def measure(options: Options) -> None:
    """Train each model with each seed, the first seed first."""
    lengths = {name: int(name) // (TOY if options.dry_run else 1) for name in LENGTHS}
    example = configure("base", options)
    tokens = ", ".join(map(str, lengths.values()))
    header = Header(
        kind="training",
        title="Perplexity on long documents, by the length of the evaluation",
        setting=f"{in_words(example, options.device)}; evaluated in windows of {tokens} tokens "
        "that overlap by half, with the same targets; landmarks compared as by the paper's "
        "released code, without projections; projected: as by its text",
        how="scaled down",
        columns=LENGTHS,
        models=tuple(MODELS),
        unit="perplexity",
        better="lower",
    )
    path = options.out / f"{Path(DOCUMENTS).name}.json"
    result = Result(path, header, origin(options.device), say)
    configs = {model: configure(MODELS[model], options) for model in options.models}
    if PROJECTED in configs:
        configs[PROJECTED] = projected(configs[PROJECTED])
    test = partial(perplexities, lengths=lengths)
    where = (options.runs, options.device, options.jobs)
    train_and_test(result, configs, options.seeds, test, *where)


def configure(architecture: str, options: Options) -> TrainConfig:
    """Return the run of one model on the given text; in a dry run at a toy size."""
    data = DataConfig(source=options.data, tokenizer=options.tokenizer)
    if options.dry_run:
        recipe = RECIPES[f"tiny_{architecture}"]()
        toy = int(TRAINED_AT) // TOY
        return replace(recipe, data=data, seq_len=toy, batch_size=2, steps=2, eval_batches=1)
    recipe = RECIPES[f"small_{architecture}"]()
    return replace(
        recipe, data=data, batch_size=BATCH, steps=STEPS, eval_every=300, checkpoint_every=10**9
    )


def projected(config: TrainConfig) -> TrainConfig:
    """Return the run of DRT that projects landmarks before it compares them."""
    stack = config.model.stack
    assert isinstance(stack, DRTConfig)
    return replace(config, model=replace(config.model, stack=replace(stack, projections=True)))


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, tuple(MODELS), trains=True, parallel=True))
