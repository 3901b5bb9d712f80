"""Speeds: Figure 4 and footnote 7 (whole models of 1.3B), and an op and layers beside fla's."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from mezzo_core.nn.lm import LMConfig
from mezzo_core.reproduction import Cell, Entry
from mezzo_core.reproduction.generation_speed import time_latency
from mezzo_core.reproduction.layer_speed import build_model, time_model
from mezzo_core.reproduction.runner import Job, passes, timing
from mezzo_core.reproduction.speeds import AbstractSizes, Speeds
from mezzo_core.reproduction.training_speed import time_training

from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.recipes import PAPER_NAMES, recipe
from mezzo_gsa.reproduction import fla
from mezzo_gsa.reproduction.fla import Shapes

KEPT = "GSA w/o recomp."
"""GSA with its states kept for the backward pass."""
GENERATING = {paper_name: name for name, paper_name in PAPER_NAMES.items()}
TRAINING = {**GENERATING, KEPT: "gsa"}
SLOTS = {"32 slots": "gsa_m32", "64 slots": "gsa", "128 slots": "gsa_m128"}
"""The recipe of each model."""


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    """The sizes of all speeds."""

    size: str = "1p3b"  # of the recipes
    tokens: int = 16_384  # of a batch
    lengths: tuple[int, ...] = (2048, 4096, 8192, 16_384)  # its T
    prompt: int = 2048  # tokens before generation
    new_tokens: tuple[int, ...] = (512, 1024, 2048)  # after it
    shapes: Shapes = field(default_factory=Shapes)  # of ops and layers


FULL = Sizes()
DRY = Sizes(
    device="cpu",
    size="tiny",
    tokens=128,
    lengths=(32, 64),
    prompt=16,
    new_tokens=(4, 8),
    shapes=Shapes(((2, 128), (1, 256)), 2, 16, 8, 0.0),
)
"""Toy sizes for a CPU, and for a rehearsal: the same steps."""


def training(
    title: str, models: Mapping[str, str], last: int | None, sizes: Sizes
) -> tuple[dict[str, Any], list[Job]]:
    """List whole training steps of models, at all lengths or those before the `last` one."""
    lengths = sizes.lengths[:last]
    header = {
        "title": title,
        "setting": "whole training steps (forward, backward, fused AdamW) of the "
        f"{sizes.size} recipes' models, {sizes.tokens:,} random tokens in sequences of T, bf16 "
        "autocast over float32 weights, the blocks compiled on a GPU",
        "unit": "tokens/s",
        "better": "higher",
    }
    jobs = [
        timing(
            {Cell(model, str(T)): {"B": sizes.tokens // T, "T": T} for T in lengths},
            partial(time_model, time_training, config, compiles=True),
            "tokens_per_second",
        )
        for model, name in models.items()
        for config in [configure(model, name, sizes)]
    ]
    return header, jobs


def generation(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List the latency of one sequence, which gives all counts of new tokens in one pass."""
    included = "prompt" if sizes.device == "cpu" else "prompt and capture of the CUDA graph"
    header = {
        "title": "Figure 4c: generation",
        "setting": f"one sequence of the {sizes.size} recipes' models, a prompt of "
        f"{sizes.prompt:,} tokens and then N new ones, greedy, bf16 weights; {included} "
        "included",
        "unit": "s",
    }
    jobs = [
        Job(
            tuple(Cell(model, f"N={count}") for count in sizes.new_tokens),
            partial(_generate, configure(model, name, sizes), sizes),
        )
        for model, name in GENERATING.items()
    ]
    return header, jobs


def _generate(
    config: LMConfig, sizes: Sizes, cells: tuple[Cell, ...], folder: Path, device: torch.device
) -> Iterator[list[Entry]]:
    model = build_model(config, device).bfloat16().eval()
    state_mb = model.state_bytes(sizes.prompt + max(sizes.new_tokens)) / 1e6
    found = time_latency(model, sizes.prompt, sizes.new_tokens)
    for cell in cells:
        yield passes(cell, found[int(cell.column[2:])], "seconds", state_mb=state_mb)


def ops(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List GSA's op, and layers, one at a time, beside fla's."""
    header = {
        "kind": "timings",
        "title": "Ops and layers one at a time, beside flash-linear-attention's (bench_fla)",
        "setting": "medians of repeated calls",
        "unit": "ms",
    }
    return header, fla.jobs(sizes.shapes, sizes.device)


def configure(model: str, name: str, sizes: Sizes) -> LMConfig:
    """Return the recipe's model; that without recomputation keeps its states for the backward."""
    config = recipe(sizes.size, name).model
    if model != KEPT:
        return config
    kept = (replace(m, keep_states=True) for m in config.mixers if isinstance(m, GSAConfig))
    return replace(config, mixers=tuple(kept))


SPEEDS = Speeds(
    {
        "speed_training": partial(training, "Figure 4a, 4b: training", TRAINING, None),
        "speed_slots": partial(training, "Footnote 7: slots", SLOTS, 1),
        "speed_generation": generation,
        "bench_fla": ops,
    },
    FULL,
    DRY,
    prefix="",
)
