"""`mezzo-recurrent-transformer bench`: one layer, a stack of layers, and the tiny models.

Each is measured beside the Transformer of the same weights; rows tell them apart by their
implementation, "mezzo" and "transformer". A layer is a whole block, attention and MLP.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from mezzo_core.bench import (
    Row,
    attempt,
    build_layer,
    check_layer,
    compiled,
    run,
    say,
    time_layer,
)
from mezzo_core.bench.layer import Run
from mezzo_core.bench.training_step import model_rows

from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.recipes import RECIPES, AnyLayer, stack
from mezzo_recurrent_transformer.transformer import TransformerBlockConfig

PHASES: tuple[Literal["forward", "train"], ...] = ("forward", "train")
CHECKED_DEPTH = 2
"""Layers of the stack that is checked: the references of many would take minutes."""


@dataclass(frozen=True)
class Shapes:
    """The shapes of one benchmark."""

    d_model: int
    head_dim: int
    seq_len: int  # T
    batches: tuple[int, ...]  # B
    depth: int  # layers of the stack
    models: tuple[str, ...]  # recipes
    seconds: float  # for each timing


TINY = tuple(name for name in RECIPES if name.startswith("tiny_"))
QUICK = Shapes(32, 16, 32, (2,), 2, ("tiny_transformer", "tiny_recurrent"), 0.05)
CPU = Shapes(64, 16, 64, (8, 32), 2, TINY, 1.0)
GPU = Shapes(1024, 64, 512, (32, 128, 512, 1024), 12, TINY, 0.5)
"""The paper's layer (section "The setup"), at batches of its Table 2."""


def bench(
    device: torch.device, quick: bool = False, out: Path | None = None
) -> list[dict[str, Any]]:
    """Measure layers, stacks and tiny models on `device`, say each row, and append it to `out`.

    Returns:
        The rows as JSON values.

    Raises:
        UserError: if a layer computes wrong results; it is not timed.
    """
    shapes = QUICK if quick else GPU if device.type == "cuda" else CPU

    def rows() -> Iterator[Row]:
        yield from layer_rows(shapes, device)
        for name in shapes.models:
            config = RECIPES[name]()
            size = config.batch_size, config.seq_len
            yield from model_rows(name, "auto", config.model, *size, device, shapes.seconds)

    return run(rows(), device, out, say)


def layer_rows(shapes: Shapes, device: torch.device) -> Iterator[Row]:
    """Time forward and forward+backward of a layer, then of a stack, at each batch."""
    layers: dict[str, AnyLayer] = {
        # First: the recurrent op keeps memory for its CUDA graphs.
        "transformer": TransformerBlockConfig(head_dim=shapes.head_dim),
        "mezzo": RecurrentBlockConfig(head_dim=shapes.head_dim),
    }
    for kind in ("layer", "stack"):
        is_stack = kind == "stack"
        for impl, config in layers.items():
            checked = stack(config, CHECKED_DEPTH) if is_stack else config
            check_layer(build_layer(checked, shapes.d_model, device, alone=True))
            timed = stack(config, shapes.depth) if is_stack else config
            layer = build_layer(timed, shapes.d_model, device, alone=True)
            # The recurrent layers are one op, in which nothing is left to compile.
            code: Run = layer if impl == "mezzo" else compiled(layer)
            for B in shapes.batches:
                shape = {"B": B, "T": shapes.seq_len, "C": shapes.d_model}
                if is_stack:
                    shape["depth"] = shapes.depth
                for phase in PHASES:
                    work = partial(time_layer, layer, code, phase, B, shapes.seq_len, passes=1)
                    found = attempt(partial(work, seconds=shapes.seconds))
                    name = f"recurrent_transformer {kind} {phase}"
                    if isinstance(found, str):
                        say(f"{name} ({impl}) at {shape}: out of memory")
                    else:
                        yield Row(name, impl, shape, found[0])
