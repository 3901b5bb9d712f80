"""`mezzo-rat bench`: speed and memory of single layers and of the tiny models.

A layer is x + mixer(norm(x)) with all projections, as the paper times it.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from mezzo_core.bench import Row, attempt, run, say
from mezzo_core.bench.layer import build_layer, check_layer, compiled, time_layer
from mezzo_core.bench.training_step import model_rows
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.contract import MixerConfig

from mezzo_rat import speed
from mezzo_rat.mixer import RATConfig
from mezzo_rat.recipes import RECIPES
from mezzo_rat.speed import Sizes, paper_layers

QUICK = replace(speed.CPU, tokens=2048, lengths=(512, 2048), d_model=64, seconds=0.2)
CPU = replace(speed.CPU, seconds=1.0)
GPU = replace(speed.FULL, lengths=(4096, 16_384, 65_536), seconds=0.5)
PHASES: tuple[Literal["forward", "train"], ...] = ("forward", "train")
TINY = tuple(name for name in RECIPES if name.startswith("tiny_"))


def bench(
    device: torch.device, quick: bool = False, out: Path | None = None
) -> list[dict[str, Any]]:
    """Measure layers and tiny models on `device`, say each row, and append it to `out`.

    Returns:
        The rows as JSON values.

    Raises:
        UserError: if a layer computes wrong results; it is not timed.
    """
    sizes = QUICK if quick else GPU if device.type == "cuda" else CPU
    tiny = ("tiny_attention", "tiny_rat_l16") if quick else TINY

    def rows() -> Iterator[Row]:
        yield from layer_rows(sizes, device)
        for name in tiny:
            config = RECIPES[name]()
            shape, seconds = (config.batch_size, config.seq_len), 1.0 if quick else 5.0
            yield from model_rows(name, "auto", config.model, *shape, device, seconds)

    return run(rows(), device, out, say)


def layer_rows(sizes: Sizes, device: torch.device) -> Iterator[Row]:
    """Time forward and forward+backward of each layer at each sequence length."""
    for config in paper_layers(sizes.head_dim).values():
        layer = build_layer(config, sizes.d_model, device)
        check_layer(layer)
        code = compiled(layer)
        name, impl = row_name(config, device)
        for T in sizes.lengths:
            shape = {"B": sizes.tokens // T, "T": T, "C": sizes.d_model, "D": sizes.head_dim}
            if isinstance(config, RATConfig):
                shape["L"] = config.chunk_size
            for phase in PHASES:
                work = partial(time_layer, layer, code, phase, shape["B"], T, passes=1)
                found = attempt(partial(work, seconds=sizes.seconds))
                if isinstance(found, str):
                    say(f"{name} {phase} at {shape}: out of memory")
                else:
                    yield Row(f"{name} {phase}", impl, shape, found[0])


def row_name(config: MixerConfig, device: torch.device) -> tuple[str, str]:
    """Return the layer's name in a row, and the implementation that `impl="auto"` chooses."""
    if isinstance(config, AttentionConfig):
        return "attention layer", "sdpa"
    name = "rat layer" if isinstance(config, RATConfig) else "linear_rnn layer"
    return name, "triton" if device.type == "cuda" else "reference"
