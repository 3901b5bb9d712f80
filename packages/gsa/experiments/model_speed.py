"""Measure Figure 4 and footnote 7 at the paper's size: 1.3B models on one GPU.

    python packages/gsa/experiments/model_speed.py --out packages/gsa/results/nvidia-h200
    python packages/gsa/experiments/model_speed.py --out DIR --models GSA GLA
    python packages/gsa/experiments/model_speed.py --out DIR --dry-run    # toy sizes, on a CPU

Writes speed_training.json (training on batches of 16,384 tokens, with the peak of the memory),
speed_slots.json (footnote 7) and speed_generation.json (latency after a prompt of 2,048 tokens).
"""

import sys
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from mezzo_core import bench
from mezzo_core.bench import Header, Options, Result, say
from mezzo_core.bench.training_step import time_training
from mezzo_core.nn.lm import LM, LMConfig
from mezzo_gsa.bench import fla
from mezzo_gsa.claims import GLA, GSA, KEPT, RETNET, XFMR
from mezzo_gsa.recipes import recipe

FLA = "GSA, fla's layer"
GENERATING = {XFMR: "attention", RETNET: "retnet", GLA: "gla", GSA: "gsa"}
TRAINING = {**GENERATING, KEPT: "gsa", FLA: "gsa"}
SLOTS = {"32 slots": "gsa_m32", "64 slots": "gsa", "128 slots": "gsa_m128"}
MODELS = TRAINING | SLOTS
"""The recipe of each model."""


class Sizes(NamedTuple):
    """The recipes' size, tokens of a batch and its lengths T, tokens of a prompt and after it."""

    models: str
    tokens: int
    lengths: tuple[int, ...]
    prompt: int
    new_tokens: tuple[int, ...]


FULL = Sizes("1p3b", 16_384, (2048, 4096, 8192, 16_384), 2048, (512, 1024, 2048))
DRY = Sizes("tiny", 128, (32, 64), 16, (4, 8))


def measure(options: Options) -> None:
    """Measure one model after another."""
    sizes, device = (DRY if options.dry_run else FULL), options.device
    steps = (
        f"whole training steps (forward, backward, fused AdamW) of the {sizes.models} recipes' "
        f"models, {sizes.tokens:,} random tokens in sequences of T, bf16 autocast over float32 "
        "weights, the blocks compiled on a GPU"
    )
    latency = (
        f"one sequence of the {sizes.models} recipes' models, a prompt of {sizes.prompt:,} tokens "
        "and then N new ones, greedy, bf16 weights; prompt and capture of the CUDA graph included"
    )
    how = "scaled down" if options.dry_run else "other hardware"
    lengths = tuple(map(str, sizes.lengths))
    counts = tuple(f"N={count}" for count in sizes.new_tokens)
    rows = {
        "training": ("Figure 4a, 4b: training", steps, lengths, TRAINING, "tokens/s", "higher"),
        "slots": ("Footnote 7: slots", steps, lengths[:1], SLOTS, "tokens/s", "higher"),
        "generation": ("Figure 4c: generation", latency, counts, GENERATING, "s", "lower"),
    }
    results = {}
    for name, (title, setting, columns, models, *unit) in rows.items():
        header = Header("speed", title, setting, how, columns, tuple(models), *unit)
        path = options.out / f"speed_{name}.json"
        results[name] = Result(path, header, bench.origin(device), say)
    for name in options.models:
        if name == FLA and not fla.is_installed():
            say(f"{FLA}: left out, flash-linear-attention is not installed")
            continue
        config = configure(name, sizes)
        bench.check_mixers(config, device)
        train(name, config, sizes.tokens, results["slots" if name in SLOTS else "training"], device)
        if name in GENERATING and not results["generation"].has(name, counts[-1]):
            model = build(config, device).bfloat16().eval()
            state_mb = model.state_bytes(sizes.prompt + max(sizes.new_tokens)) / 1e6
            found = bench.time_latency(model, sizes.prompt, sizes.new_tokens)
            for count, passes in found.items():
                place = {"model": name, "column": f"N={count}", "state_mb": state_mb}
                results["generation"].add_passes(passes, "seconds", **place)


def configure(name: str, sizes: Sizes) -> LMConfig:
    """Return the recipe's model; that without recomputation keeps its states for the backward."""
    config = recipe(sizes.models, MODELS[name]).model
    if name != KEPT:
        return config
    return replace(config, mixers=tuple(replace(gsa, keep_states=True) for gsa in config.mixers))


def build(config: LMConfig, device: torch.device) -> LM:
    """Build a model after freeing what an earlier one left."""
    bench.start_afresh()
    torch.manual_seed(0)
    with device:
        return config.build()


def train(name: str, config: LMConfig, tokens: int, result: Result, device: torch.device) -> None:
    """Time training at each length that the result does not have yet."""
    lengths = [T for T in map(int, result.header.columns) if not result.has(name, str(T))]
    if not lengths:
        return
    model = build(config, device)
    if name == FLA:
        fla.replace_mixers(model)
    if device.type == "cuda":
        for block in model.stack.blocks:
            block.compile(dynamic=False, fullgraph=name != FLA)
    for T in lengths:
        passes = bench.attempt(partial(time_training, model, tokens // T, T))
        result.add_passes(passes, "tokens_per_second", model=name, column=str(T))


if __name__ == "__main__":
    sys.exit(bench.run_script(measure, __doc__, list(MODELS)))
