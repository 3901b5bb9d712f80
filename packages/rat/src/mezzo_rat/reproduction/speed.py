"""The paper's speeds: Tables 6, 7 and 8 (one layer), Figure 5 (generation by whole models).

Each is measured into `speed_NAME.json` below a folder.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.reproduction import Cell, Timing
from mezzo_core.reproduction.generation_speed import time_step, time_throughput
from mezzo_core.reproduction.layer_speed import build_layer, compiled, time_layer, time_model
from mezzo_core.reproduction.runner import Job, timing
from mezzo_core.reproduction.speeds import AbstractSizes, Speeds

from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.recipes import PAPER_NAMES, recipe


def paper_layers(head_dim: int) -> dict[str, MixerConfig]:
    """Return the layers of Tables 6 to 8, by the paper's names, in its order."""
    return {
        "RNN": LinearRNNConfig(),
        "RAT(L=128)": RATConfig(chunk_size=128, head_dim=head_dim),
        "RAT(L=64)": RATConfig(chunk_size=64, head_dim=head_dim),
        "RAT(L=16)": RATConfig(chunk_size=16, head_dim=head_dim),
        "Attention": AttentionConfig(head_dim=head_dim),
    }


GENERATING = {
    PAPER_NAMES[name]: name for name in ("attention", "rat_l16", "attention_swa", "rat_swa", "rnn")
}
"""The models whose throughput the paper prints, with the recipes' names."""


@dataclass(frozen=True)
class Sizes(AbstractSizes):
    """The sizes of all speed tables."""

    d_model: int = 2048  # C and D of the layers of Tables 6 to 8
    head_dim: int = 128
    tokens: int = 262_144  # of a batch in Tables 6 and 7, for every T
    lengths: tuple[int, ...] = tuple(2**i for i in range(10, 19))
    """T of Tables 6 and 7; some are shorter than the paper's, as attention may win there."""
    positions: tuple[int, ...] = tuple(2**i for i in range(12, 19))  # of Table 8's token
    batches: tuple[int, ...] = (64, 512, 1024)  # B of Table 8
    contexts: tuple[tuple[int, str], ...] = ((4096, "1p3b"), (8192, "1p3b"), (16_384, "1p3b_16k"))
    """T of Figure 5, that of Table 1 first and that of Table 11 last, and the recipes' size."""
    new_tokens: int = 1024  # of each sequence in Figure 5, after a prompt of T - new_tokens
    max_batch: int = 4096  # there; for a model with a small state, a larger batch no longer helps
    seconds: float = 0.05  # for each timing


FULL = Sizes()
CPU = Sizes(
    device="cpu",
    d_model=128,
    head_dim=32,
    tokens=4096,
    lengths=(512, 1024, 2048, 4096),
    positions=(512, 1024, 2048, 4096),
    batches=(64,),
    contexts=((128, "tiny"), (512, "tiny")),
    new_tokens=32,
    max_batch=16,
    seconds=0.02,
)
DRY = Sizes(
    device="cpu",
    d_model=64,
    head_dim=16,
    tokens=128,
    lengths=(64, 128),
    positions=(64, 128),
    batches=(2, 64),
    contexts=((32, "tiny"), (48, "tiny")),
    new_tokens=4,
    max_batch=8,
    seconds=0.0,
)
"""A rehearsal: the same steps at toy sizes."""


def layers(name: str, sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List times of one layer: "table6" (training), "table7" (prefilling), "table8" (decoding)."""
    cuda, decoding = sizes.device == "cuda", name == "table8"
    title, what = {
        "table6": ("Training time of one layer (Table 6)", "forward and backward"),
        "table7": ("Prefilling time of one layer (Table 7)", "forward"),
        "table8": ("Decoding time of one layer at a position (Table 8)", "one token at a position"),
    }[name]
    batch = "whole batch" if decoding else f"{sizes.tokens:,} tokens a batch"
    bf16 = "bf16, in a CUDA graph" if decoding else "bf16 autocast over float32, torch.compile"
    header = {
        "title": title,
        "setting": f"{what} of one layer (norm, mixer, residual), {batch}, "
        f"{bf16 if cuda else 'float32, eager'}, C = {sizes.d_model}, D = {sizes.head_dim}; "
        "medians of 3 passes",
        "unit": "ms",
    }
    if decoding:
        by_cell = {
            (str(T), f"B={B}"): {"B": B, "position": T}
            for B in sizes.batches
            for T in sizes.positions
        }
    else:
        by_cell = {(str(T), ""): {"B": max(1, sizes.tokens // T), "T": T} for T in sizes.lengths}
    phase = {"table6": "train", "table7": "forward"}.get(name)
    jobs = []
    for model, config in paper_layers(sizes.head_dim).items():
        cells = {Cell(model, *place): each for place, each in by_cell.items()}
        jobs.append(timing(cells, partial(_layer_timer, config, phase, sizes), "ms"))
    return header, jobs


def _layer_timer(
    config: MixerConfig, phase: Any, sizes: Sizes, device: torch.device
) -> Callable[..., list[Timing]]:
    layer = build_layer(config, sizes.d_model, device)
    if phase is not None:
        return partial(time_layer, layer, compiled(layer), phase, seconds=sizes.seconds)
    layer = layer.bfloat16() if device.type == "cuda" else layer
    return partial(time_step, layer, seconds=sizes.seconds)


def generation(sizes: Sizes) -> tuple[dict[str, Any], list[Job]]:
    """List Figure 5: the most tokens a second that a whole model generates.

    The value leaves the time of the prompts out. So must the paper's, without saying so: its RNN's
    130,000 tokens a second after prompts of 15,360 would otherwise mean 2 million prompt tokens a
    second, five times what an H100's peak allows a model of 1.3B weights. `with_prompt` has it.
    """
    recipes = ", ".join(sorted({size for _, size in sizes.contexts}))
    header = {
        "title": "Largest throughput of generation (Figure 5, Tables 1 and 11)",
        "setting": f"{sizes.new_tokens} new tokens after a prompt of T - {sizes.new_tokens}, "
        f"random weights of the recipes {recipes}, {sizes.dtype}, the "
        f"largest batch whose state fits (at most {sizes.max_batch}); greedy steps, in a CUDA "
        "graph on a GPU, timed at the first, middle and last position; the prompts' time is left "
        "out, as it must be in the paper's numbers, and is in the details; 3 passes",
        "unit": "tokens a second",
        "better": "higher",
    }
    limits: dict[str, Any] = {"max_batch": sizes.max_batch, "seconds": sizes.seconds}
    jobs = [
        timing(
            {Cell(name, f"T={T}"): {"context": T, "new_tokens": sizes.new_tokens}},
            partial(time_model, time_throughput, model, decodes=True, **limits),
            "tokens_per_second",
        )
        for T, size in sizes.contexts
        for name, architecture in GENERATING.items()
        for model in [recipe(size, architecture).model]
    ]
    return header, jobs


SPEEDS = Speeds(
    {
        **{name: partial(layers, name) for name in ("table6", "table7", "table8")},
        "fig5": generation,
    },
    FULL,
    DRY,
    CPU,
)
