"""Train 6 and 12 layers of both architectures, and the RMSNorm ablation, at a small size.

    python packages/recurrent_transformer/experiments/train_small.py --data 'texts/*.jsonl.xz' \
        --tokenizer gpt2/ --jobs 28 --seeds 0 1 2 3 --out packages/recurrent_transformer/results/GPU
    python packages/recurrent_transformer/experiments/train_small.py --out DIR --dry-run

Writes train_small.json: 6 and 12 layers of about equal weights on the same tokens, each at its best
learning rate; seed 0 chooses it. Writes train_rates.json: 12 recurrent layers at three learning
rates, with and without the norm before the persistent pair, with every seed. `--models` takes some
alone, also the recurrent ones in blocks of 8 and 32 tokens.
"""

import sys
from dataclasses import replace
from itertools import chain

from mezzo_core.reproduction import Options, run_script
from mezzo_core.reproduction.training import at_rate, in_words, trainings
from mezzo_core.train.config import TrainConfig
from mezzo_recurrent_transformer.recipes import (
    PAPER_NAMES,
    SIZES,
    Hyperparameters,
    tiny,
    train_config,
    with_layers,
)

XFMR, RT = PAPER_NAMES.values()
KINDS = {
    RT: "recurrent",
    XFMR: "transformer",
    f"{RT}, blocks of 8": "recurrent_b8",
    f"{RT}, blocks of 32": "recurrent_b32",
}
MODELS = {
    with_layers(model, layers): (f"small_{layers}", architecture)
    for model, architecture in KINDS.items()
    for layers in (12, 6)
}
"""Size and architecture of each model of train_small.json."""
RATES = {"1e-3": 1e-3, "1.5e-3": 1.5e-3, "3e-3": 3e-3, "6e-3": 6e-3, "1e-2": 1e-2}
NORMS = {"with RMSNorm": "recurrent", "without RMSNorm": "recurrent_raw"}
OF_NORMS = {rate: RATES[rate] for rate in ("1e-3", "3e-3", "1e-2")}


def measure(options: Options) -> None:
    """Train each model at its best rate, then each of the ablation at each rate."""
    example = configure("small_12", "recurrent", options)
    words = f"{in_words(example, options.device)}, but for the rate; cosine to a tenth of it"
    wide = hyperparameters("small_6", options).d_model
    options.sweep(
        "train_small",
        {model: configure(*each, options) for model, each in MODELS.items()},
        RATES,
        title="6 and 12 layers of both architectures, each at its best learning rate",
        setting=f"{words}; 6 layers: C {wide}; Transformers with torch.compile; seed 0 at the "
        "three rates in the middle and at the next ones while a model's best is at an end, the "
        "other seeds at the model's best",
    )
    norms = {model: configure("small_12", name, options) for model, name in NORMS.items()}
    at_each = {
        rate: {model: at_rate(config, lr) for model, config in norms.items()}
        for rate, lr in OF_NORMS.items()
    }
    options.run(
        "train_rates",
        chain.from_iterable(
            trainings(configs, [rate], options.seeds) for rate, configs in at_each.items()
        ),
        title="RMSNorm before the persistent pairs, at three learning rates",
        setting=f"recurrent layers, {words}",
    )


def hyperparameters(size: str, options: Options) -> Hyperparameters:
    """Return those of a size, on the given text; in a dry run at a toy size."""
    if options.dry_run:
        return replace(tiny(), data=options.text, seq_len=16, batch_size=2, steps=2, eval_batches=1)
    make, _ = SIZES[size]
    return replace(make(), data=options.text, eval_batches=None, checkpoint_every=10**9)


def configure(size: str, architecture: str, options: Options) -> TrainConfig:
    """Return the run of one model."""
    return train_config(f"{size}_{architecture}", hyperparameters(size, options), architecture)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, (*MODELS, *NORMS), trains=True, parallel=True))
