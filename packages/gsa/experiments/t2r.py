"""Train a Transformer on one GPU, turn it into GSA, GLA and RetNet, and fine-tune each.

    python packages/gsa/experiments/t2r.py --data 'data/*.jsonl.xz' --tokenizer gpt2/ \
        --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/t2r.py --dry-run --out DIR        # toy sizes, on a CPU

The Transformer is a small Mistral: grouped keys, RoPE, SwiGLU. The fine-tuning trains all weights,
on the same tokens for every target; the first point of its curve is the converted model. GSA is
also trained from nothing, with the tokens of the fine-tuning and the Transformer's learning rate.
"""

import shutil
import sys
from dataclasses import replace

import torch
from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.training import in_words, train_runs
from mezzo_core.data import DataConfig
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model, save_model
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_gsa.convert import TARGETS, convert

TRANSFORMER, CONTROL = "Transformer", "GSA from nothing"
SPREAD = "GSA, slots started apart"
CONVERTED = {"GSA": "gsa", SPREAD: "gsa_spread", "GLA": "gla", "RetNet": "retnet"}
"""The target of each model that is converted."""
MODELS = (TRANSFORMER, *CONVERTED, CONTROL)
COLUMN = "Val. PPL"
FULL = TrainConfig(
    name="t2r",
    model=LMConfig(
        vocab_size=50_257,
        d_model=512,
        mixers=(AttentionConfig(head_dim=64, num_kv_heads=2),) * 8,
        mlp=MLPConfig("swiglu"),
        norm_eps=1e-5,
    ),
    optim=OptimConfig(lr=1e-3, min_lr=1e-4, warmup_fraction=0.1, weight_decay=0.01),
    seq_len=1024,
    batch_size=32,
    steps=700,
    eval_every=70,
    checkpoint_every=700,
    compile=True,
)
"""The Transformer's training."""
TOY_MIXERS = (AttentionConfig(head_dim=8, num_kv_heads=2),) * 2
TOY = replace(
    FULL,
    model=replace(FULL.model, vocab_size=257, d_model=32, mixers=TOY_MIXERS),
    optim=replace(FULL.optim, lr=3e-3, min_lr=3e-4),
    seq_len=64,
    batch_size=4,
    steps=20,
    eval_every=2,
    eval_batches=2,
    checkpoint_every=20,
    compile=False,
)
TUNE_STEPS, TOY_TUNE_STEPS = 150, 10
TUNE_LR = 0.3  # of a fine-tuning, over the Transformer's


def measure(options: Options) -> None:
    """Train, convert and fine-tune, seed after seed."""
    words = in_words(configure(TRANSFORMER, 0, options), options.device)
    steps = TOY_TUNE_STEPS if options.dry_run else TUNE_STEPS
    title = "Section 4.2: a Transformer fine-tuned into RNNs, at a small size"
    setting = (
        f"the Transformer with grouped keys, {words}; then each target {steps} such steps at "
        f"{TUNE_LR:g} times this lr, and GSA from nothing {steps} steps at this lr"
    )
    header = Header(
        "training", title, setting, "scaled down", (COLUMN,), MODELS, "perplexity", "lower"
    )
    result = Result(options.out / "t2r.json", header, origin(options.device), say)
    for seed in options.seeds:
        for model in options.models:
            if not result.has(model, COLUMN, seed=seed):
                config, work = configure(model, seed, options), options.runs / "work"
                train_runs(result, [(model, COLUMN, config)], work, options.device)
                if model == TRANSFORMER:
                    kept = options.runs / f"transformer-{seed}"
                    shutil.rmtree(kept, ignore_errors=True)
                    shutil.copytree(work / "model", kept)


def configure(model: str, seed: int, options: Options) -> TrainConfig:
    """Return a model's run; one that is converted starts from what is written here."""
    data = DataConfig(source=options.data, tokenizer=options.tokenizer)
    config = replace(TOY if options.dry_run else FULL, seed=seed, data=data)
    if model == TRANSFORMER:
        return config
    target = CONVERTED.get(model, "gsa")
    source, described, extra = load_model(options.runs / f"transformer-{seed}")
    new, weights = convert(described, source.state_dict(), TARGETS[target], seed=seed)
    steps = TOY_TUNE_STEPS if options.dry_run else TUNE_STEPS
    config = replace(config, model=new, steps=steps, eval_every=steps // 10, checkpoint_every=steps)
    if model == CONTROL:
        return config
    start = options.runs / f"{target}-{seed}"
    with torch.device("meta"):
        built = new.build()
    save_model(built, new, start, extra, weights=weights)
    lr = TUNE_LR * config.optim.lr
    return replace(config, optim=replace(config.optim, lr=lr, min_lr=lr / 10), init_from=str(start))


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, MODELS, trains=True))
