"""The paper's speeds: Table 2, latency over the length, throughput of training, and decoding.

Each is measured into `speed_NAME.json` below a folder. The algorithm of the paper stands beside our
op: it is Algorithm 1 in eager PyTorch (`schedule`), launched from Python or as one CUDA graph.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mezzo_core.reproduction import Cell, Timing, captured
from mezzo_core.reproduction.generation_speed import time_throughput
from mezzo_core.reproduction.layer_speed import build_layer, compiled, time_model
from mezzo_core.reproduction.runner import Job, timing
from mezzo_core.reproduction.speeds import AbstractSizes, Speeds
from mezzo_core.reproduction.timing import measure_passes
from mezzo_core.reproduction.training_speed import time_training
from torch import Tensor

from mezzo_recurrent_transformer.block import RecurrentBlock, RecurrentBlockConfig, run_layers
from mezzo_recurrent_transformer.recipes import PAPER_NAMES, recipe, with_layers
from mezzo_recurrent_transformer.schedule import tiled_forward
from mezzo_recurrent_transformer.transformer import TransformerBlockConfig

NAIVE, EAGER, GRAPH = "naive", "tiled, without CUDA Graphs", "tiled, with CUDA Graphs"
OP, TRANSFORMER = "our op", "Transformer"
LAYERS = {"graphs": (EAGER, GRAPH, OP, TRANSFORMER), "length": (NAIVE, GRAPH, OP, TRANSFORMER)}
"""The layers that are timed over the batch (Table 2) and over the length T."""
DEPTHS = (12, 6)
MODELS = {
    with_layers(paper_name, depth): (depth, architecture)
    for depth in DEPTHS
    for architecture, paper_name in reversed(PAPER_NAMES.items())
}
"""The models whose throughput the paper prints: layers and architecture."""
PASSES = 3


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    """The sizes of all speeds."""

    d_model: int = 1024  # C and D of a layer
    head_dim: int = 64
    seq_len: int = 512  # T of Table 2
    batches: tuple[int, ...] = tuple(2**i for i in range(5, 12))  # B of Table 2
    batch: int = 512  # B of the latency over the length
    lengths: tuple[int, ...] = tuple(2**i for i in range(6, 13))  # its T
    naive: int = 1024  # the longest T of the naive loop, which reads T^2 positions
    trained: tuple[str, ...] = ("300m_12", "300m_6")  # the recipes' sizes, by DEPTHS
    most_trained: int = 512  # sequences of a training step, if the recipe computes more at once
    contexts: tuple[int, ...] = (512, 4096)  # tokens of a generated sequence in the end
    new_tokens: int = 128  # those of them that follow the prompt
    most_generated: int = 2048  # sequences that are generated at once, if more fit
    seconds: float = 0.05  # for each timing


FULL = Sizes()
DRY = Sizes(
    device="cpu",
    d_model=32,
    head_dim=16,
    seq_len=8,
    batches=(1, 2),
    batch=2,
    lengths=(4, 8),
    naive=8,
    trained=("tiny", "tiny"),
    most_trained=1,
    contexts=(8,),
    new_tokens=4,
    most_generated=8,
    seconds=0.0,
)
"""Toy sizes for a CPU, and for a rehearsal: the same steps."""


def layers(name: str, sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List the forward of one layer over the batch ("graphs") or over T ("length")."""
    by_batch = name == "graphs"
    cells = {str(T): {"B": sizes.batch, "T": T} for T in sizes.lengths}
    if by_batch:
        cells = {f"B={B}": {"B": B, "T": sizes.seq_len} for B in sizes.batches}
    what = {"graphs": "latency over the batch (Table 2)", "length": "latency over the length"}[name]
    header = {
        "title": f"One layer: {what}",
        "setting": f"forward of one layer, attention and MLP, C = {sizes.d_model}, heads of "
        f"{sizes.head_dim}, {f'T = {sizes.seq_len}' if by_batch else f'B = {sizes.batch}'}, "
        f"{sizes.dtype}; naive: the definition in eager PyTorch, a token at a "
        "time; tiled: Algorithm 1 in eager PyTorch; the Transformer compiled; medians of "
        f"{PASSES} passes",
        "unit": "ms",
    }
    jobs = []
    for model in LAYERS[name]:
        most = sizes.naive if model == NAIVE else math.inf
        wanted = {Cell(model, column): each for column, each in cells.items() if each["T"] <= most}
        jobs.append(timing(wanted, partial(_layer_timer, model, sizes), "ms"))
    return header, jobs


def _layer_timer(
    model: str, sizes: Sizes, device: torch.device
) -> Callable[[int, int], list[Timing]]:
    """Return a function that times a layer at B and T."""
    config = TransformerBlockConfig if model == TRANSFORMER else RecurrentBlockConfig
    layer = build_layer(config(head_dim=sizes.head_dim), sizes.d_model, device, alone=True)
    layer = layer.bfloat16() if device.type == "cuda" else layer
    block: Any = layer.mixer
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        NAIVE: partial(by_definition, block),
        EAGER: partial(tiled_forward, block),
        GRAPH: partial(tiled_forward, block),
        OP: layer,
    }
    run = compiled(layer) if model == TRANSFORMER else forms[model]

    @torch.no_grad()
    def time(B: int, T: int) -> list[Timing]:
        x = torch.randn(B, T, sizes.d_model, device=device, dtype=layer.norm.weight.dtype)
        work: Callable[[], object] = partial(run, x)
        if model == GRAPH:
            work = captured(work, device)
        return measure_passes(work, device, PASSES, sizes.seconds)

    return time


def by_definition(block: RecurrentBlock, x: Tensor) -> Tensor:
    """Compute a layer by its reference: every token reads all pairs before it again."""
    return run_layers((block,), x, None, None, None, impl="reference")[0]


def throughput(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List the tokens a second of training steps of the 300M models."""
    header = {
        "title": "Training throughput of the 300M models",
        "setting": f"whole training steps (forward, backward, fused AdamW) of the recipes of "
        f"{_recipes(sizes)}, random tokens, bf16 autocast over float32 on a GPU, where the "
        "Transformer's layers are compiled; B: sequences that are computed at once",
        "unit": "tokens/s",
        "better": "higher",
    }
    jobs = []
    for model, (depth, architecture) in MODELS.items():
        config = recipe(sizes.trained[DEPTHS.index(depth)], architecture)
        B = min(config.micro_batch_size or config.batch_size, sizes.most_trained)
        cells = {Cell(model, "tokens/s"): {"B": B, "T": config.seq_len, "passes": PASSES}}
        timer = partial(time_model, time_training, config.model, compiles=config.compile)
        jobs.append(timing(cells, timer, "tokens_per_second"))
    return header, jobs


def decoding(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List the tokens a second that the 300M models generate, each at its largest batch."""
    header = {
        "title": "Decoding of the 300M models",
        "setting": f"models of the recipes of {_recipes(sizes)}, {sizes.dtype}; the last "
        f"{sizes.new_tokens} of T tokens, by a CUDA graph of a step, at the largest batch B that "
        f"fits, at most {sizes.most_generated}",
        "unit": "tokens/s",
        "better": "higher",
    }
    limits: dict[str, Any] = {"max_batch": sizes.most_generated, "seconds": sizes.seconds}
    jobs = []
    for model, (depth, architecture) in MODELS.items():
        cells = {
            Cell(model, f"T={T}"): {"context": T, "new_tokens": sizes.new_tokens}
            for T in sizes.contexts
        }
        config = recipe(sizes.trained[DEPTHS.index(depth)], architecture).model
        timer = partial(time_model, time_throughput, config, decodes=True, **limits)
        jobs.append(timing(cells, timer, "tokens_per_second"))
    return header, jobs


def _recipes(sizes: Sizes) -> str:
    return ", ".join(dict.fromkeys(sizes.trained))


SPEEDS = Speeds(
    {
        **{name: partial(layers, name) for name in LAYERS},
        "throughput": throughput,
        "decoding": decoding,
    },
    FULL,
    DRY,
)
