"""Turn small Transformers into GSA, GLA, RetNet and SUPRA, and fine-tune each at three rates.

    python packages/gsa/experiments/t2r.py --data 'texts/*.jsonl.xz' --tokenizer gpt2/ \
        --jobs 16 --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/t2r.py --dry-run --out DIR        # toy sizes, on a CPU

Each seed has a Transformer of its own, a small Mistral: grouped keys, RoPE, SwiGLU. The fine-tuning
trains all weights, on the same tokens for every target; the first point of its curve is the
converted model. GSA is also trained from nothing, with the steps of the fine-tuning and the
Transformer's learning rate. It writes t2r_rates.json.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model, save_model
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.reproduction import Cell, Entry, Options, run_script
from mezzo_core.reproduction.runner import Job
from mezzo_core.reproduction.training import in_words, training
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.folder import check_folder
from mezzo_gsa.convert import TARGETS, convert

TRANSFORMER, CONTROL = "Transformer", "GSA from nothing"
SPREAD = "GSA, slots started apart"
CONVERTED = {
    "GSA": "gsa",
    SPREAD: "gsa_spread",
    "GLA": "gla",
    "RetNet": "retnet",
    "SUPRA": "supra",
}
"""The target of each model that is converted."""
MODELS = (TRANSFORMER, *CONVERTED, CONTROL)
RATES = {"7.5e-4": 7.5e-4, "1.5e-3": 1.5e-3, "3e-3": 3e-3}
"""Of the fine-tuning."""
FROM_NOTHING = "1.5e-3"
FULL = TrainConfig(
    name="t2r",
    model=LMConfig(
        vocab_size=50_257,
        d_model=512,
        mixers=(AttentionConfig(head_dim=64, num_kv_heads=2),) * 8,
        mlp=MLPConfig("swiglu"),
        norm_eps=1e-5,
    ),
    optim=OptimConfig(warmup_fraction=0.1, weight_decay=0.01),
    seq_len=1024,
    batch_size=8,
    steps=3000,
    compile=True,
)
"""The Transformer's training, but for the rate."""
TOY_MIXERS = (AttentionConfig(head_dim=8, num_kv_heads=2),) * 2
TOY = replace(
    FULL,
    model=replace(FULL.model, vocab_size=257, d_model=32, mixers=TOY_MIXERS),
    seq_len=64,
    batch_size=4,
    steps=30,
    eval_batches=2,
    compile=False,
)
TUNED = 3  # the Transformer's training has so many times the steps of a fine-tuning


def measure(options: Options) -> None:
    """Train the Transformers of all seeds, then convert and fine-tune them."""
    example = configure(FROM_NOTHING, 0, options)
    words, tuned = in_words(example, options.device), example.steps // TUNED
    header = {
        "title": "Section 4.2: Transformers fine-tuned into RNNs, at a small size",
        "setting": f"each seed its Transformer with grouped keys, {words}, falling to a tenth; "
        f"then {tuned} such steps of each target at each column's lr, and of GSA from nothing",
        "columns": tuple(RATES),
        "models": MODELS,
    }
    for part in ((TRANSFORMER,), (*CONVERTED, CONTROL)):
        jobs = (
            Job((Cell(model, rate, seed=seed),), partial(train_one, options, model))
            for seed in options.seeds
            for model in part
            for rate in (RATES if model in CONVERTED else [FROM_NOTHING])
        )
        options.run("t2r_rates", jobs, **header)


def configure(column: str, seed: int, options: Options) -> TrainConfig:
    """Return the Transformer's run, at a column's rate."""
    config, lr = TOY if options.dry_run else FULL, RATES[column]
    return replace(
        config,
        optim=replace(config.optim, lr=lr, min_lr=lr / 10),
        seed=seed,
        data=options.text,
        eval_every=config.steps // 5,
        checkpoint_every=config.steps,
    )


def train_one(
    options: Options, model: str, cells: tuple[Cell, ...], folder: Path, device: torch.device
) -> Iterator[list[Entry]]:
    """Train one model in a scratch folder; a Transformer in one that stays, for its conversions."""
    ((_, rate, _, seed),) = cells
    config, kept = configure(rate, seed, options), options.runs / f"transformer-{seed}"
    if model == TRANSFORMER:
        yield from training(model, [rate], config, kept=kept).work(cells, folder, device)
        return
    if not (kept / "model").exists():
        raise UserError(f"{kept} has no model to start from: add {TRANSFORMER} to --models")
    # The folder may have a Transformer of another text, or a rehearsal's.
    check_folder(kept, configure(FROM_NOTHING, seed, options), resume=True)
    source, described, extra = load_model(kept / "model")
    target = TARGETS[CONVERTED.get(model, "gsa")]
    new, weights = convert(described, source.state_dict(), target, seed=seed)
    steps = config.steps // TUNED
    config = replace(config, model=new, steps=steps, eval_every=steps // 5, checkpoint_every=steps)
    if model != CONTROL:
        with torch.device("meta"):
            built = new.build()
        save_model(built, new, folder / "start", extra, weights=weights)
        config = replace(config, init_from=str(folder / "start"))
    yield from training(model, [rate], config).work(cells, folder / "run", device)


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, MODELS, trains=True, parallel=True))
