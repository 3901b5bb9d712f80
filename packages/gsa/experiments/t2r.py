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
from dataclasses import dataclass
from pathlib import Path

import torch
from mezzo_core.bench import Header, Options, Result, origin, run_script, say
from mezzo_core.bench.training import train_model
from mezzo_core.data import DataConfig
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import load_model, save_model
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_gsa.convert import TARGETS, convert

TRANSFORMER, CONTROL = "Transformer", "GSA from nothing"
CONVERTED = {
    "GSA": "gsa",
    "GSA, slots started apart": "gsa_spread",
    "GLA": "gla",
    "RetNet": "retnet",
}
"""The target of each model that is converted."""
MODELS = (TRANSFORMER, *CONVERTED, CONTROL)


@dataclass(frozen=True)
class Sizes:
    """The Transformer, and the trainings; `lr` is that of what starts from nothing."""

    model: LMConfig
    pretrain_steps: int
    tune_steps: int
    lr: float
    tune_lr: float
    batch_size: int
    seq_len: int
    eval_batches: int | None = None


TRANSFORMERS = [
    LMConfig(vocab_size, C, (mixer,) * layers, MLPConfig("swiglu"), norm_eps=1e-5)
    for vocab_size, C, layers, mixer in (
        (50_257, 512, 8, AttentionConfig(head_dim=64, num_kv_heads=2)),
        (257, 32, 2, AttentionConfig(head_dim=8, num_kv_heads=2)),
    )
]
FULL = Sizes(TRANSFORMERS[0], 700, 150, lr=1e-3, tune_lr=3e-4, batch_size=32, seq_len=1024)
TOY = Sizes(TRANSFORMERS[1], 20, 10, 3e-3, 1e-3, batch_size=4, seq_len=64, eval_batches=2)


def measure(options: Options) -> None:
    """Train, convert and fine-tune, seed after seed."""
    sizes = TOY if options.dry_run else FULL
    header = Header(
        kind="training",
        title="Section 4.2: a Transformer fine-tuned into RNNs, at a small size",
        setting=in_words(sizes, options),
        how="scaled down",
        columns=("Val. PPL",),
        models=MODELS,
        unit="perplexity",
        better="lower",
    )
    result = Result(options.out / "t2r.json", header, origin(options.device), say)
    for seed in options.seeds:
        for model in options.models:
            if not result.has(model, "Val. PPL", seed=seed):
                config = configure(model, seed, sizes, options)
                work, details = options.runs / "work", {"lr": config.optim.lr}
                train_model(result, config, work, options.device, model, "Val. PPL", **details)
                if model == TRANSFORMER:
                    kept = transformer(seed, options)
                    shutil.rmtree(kept, ignore_errors=True)
                    shutil.copytree(work / "model", kept)


def configure(model: str, seed: int, sizes: Sizes, options: Options) -> TrainConfig:
    """Return a model's run; one that is converted starts from what is written here."""
    start, described, steps, lr = None, sizes.model, sizes.tune_steps, sizes.lr
    if model == TRANSFORMER:
        steps = sizes.pretrain_steps
    else:
        target = CONVERTED.get(model, "gsa")
        source, config, extra = load_model(transformer(seed, options))
        described, weights = convert(config, source.state_dict(), TARGETS[target], seed=seed)
        if model != CONTROL:
            start, lr = options.runs / f"{target}-{seed}", sizes.tune_lr
            with torch.device("meta"):
                built = described.build()
            save_model(built, described, start, extra, weights=weights)
    return TrainConfig(
        name="t2r",
        model=described,
        data=DataConfig(source=options.data, tokenizer=options.tokenizer),
        optim=OptimConfig(lr=lr, min_lr=lr / 10, warmup_fraction=0.1, weight_decay=0.01),
        seq_len=sizes.seq_len,
        batch_size=sizes.batch_size,
        steps=steps,
        seed=seed,
        eval_every=max(1, steps // 10),
        eval_batches=sizes.eval_batches,
        checkpoint_every=steps,
        compile=not options.dry_run,
        init_from=None if start is None else str(start),
    )


def transformer(seed: int, options: Options) -> Path:
    """Return the folder of a seed's Transformer."""
    return options.runs / f"transformer-{seed}"


def in_words(sizes: Sizes, options: Options) -> str:
    """Return a description of the conditions that all runs share."""
    model = sizes.model
    mixer = model.mixers[0]
    assert isinstance(mixer, AttentionConfig)
    how = "a rehearsal at toy size, fp32" if options.dry_run else "bf16 autocast"
    return (
        f"C {model.d_model}, {len(model.mixers)} layers, {model.d_model // mixer.head_dim} heads "
        f"of {mixer.head_dim}, {mixer.num_kv_heads} of keys, T {sizes.seq_len}, "
        f"{sizes.batch_size * sizes.seq_len:,} tokens a step of {Path(options.data).name}, "
        f"tokenizer {Path(options.tokenizer).name}; the Transformer {sizes.pretrain_steps} steps "
        f"at lr {sizes.lr:g}, then each target {sizes.tune_steps} steps at lr {sizes.tune_lr:g}; "
        f"{how}, torch.compile {'off' if options.dry_run else 'on'}"
    )


if __name__ == "__main__":
    sys.exit(run_script(measure, __doc__, MODELS, trains=True))
