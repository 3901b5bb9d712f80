"""Table 8: one decoding step of one layer at a position, in a CUDA graph."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from mezzo_core.bench import captured, measure
from mezzo_core.layer_bench import Layer, check_layer
from mezzo_core.papers.cells import OOM, Result, Say, Timed, add_cell
from torch import Tensor

from mezzo_rat.reproduction.gpu.layers import build_layer
from mezzo_rat.reproduction.gpu.shapes import Selection, SpeedShapes, paper_layers

ROOM = 8
"""Slots beyond the position. (The steps before a capture run at the start of the state.)"""


def measure_decoding(shapes: SpeedShapes, selection: Selection, result: Result, say: Say) -> None:
    """Measure every layer at every batch and position, and add each cell to the result.

    Raises:
        UserError: if a layer computes wrong results; it is not timed.
    """
    for model, config in paper_layers(shapes.head_dim).items():
        cells = [
            (batch, position)
            for batch in shapes.batches
            for position in filter(selection.length, shapes.positions)
            if selection.model(model) and not result.has((f"B={batch}", model, str(position)))
        ]
        if not cells:
            continue
        layer = build_layer(config, shapes)
        check_layer(layer)
        layer = layer.bfloat16()
        for batch, position in cells:
            work = partial(time_step, layer, batch, position, shapes)
            add_cell(result, (f"B={batch}", model, str(position)), work, say)


@torch.no_grad()
def time_step(layer: Layer, batch: int, position: int, shapes: SpeedShapes) -> Timed:
    """Time x + mixer.step(norm(x)) for a batch whose rows have all seen `position` tokens.

    The state is filled with random numbers, as its values do not change the time. A prefill would
    not fit: the state of a large batch fills the GPU.
    """
    state_bytes = batch * layer.mixer.state_bytes(position + ROOM)
    details: dict[str, Any] = {"state_gb": round(state_bytes / 1e9, 3)}
    if state_bytes > shapes.free_memory():
        return OOM, details
    device = torch.device(shapes.device)
    x = torch.randn(batch, 1, shapes.d_model, device=device, dtype=torch.bfloat16)
    state = layer.mixer.reserve(layer.mixer.init_state(batch), position + ROOM)
    step = captured(lambda: x + layer.mixer.step(layer.norm(x), state), device)
    fill(state, position)
    back = partial(rewind, state, position)
    timings = [
        measure(step, device, seconds=shapes.seconds, warmup=1, before=back)
        for _ in range(shapes.passes)
    ]
    return [timing.ms for timing in timings], details


def fill(state: Any, position: int) -> None:
    """Fill a reserved state with random numbers, as if each row had seen `position` tokens."""
    for field in tensors(state):
        if field.is_floating_point():
            field.normal_()
    rewind(state, position)


def rewind(state: Any, position: int) -> None:
    """Set the lengths of a state, which are its only integer tensors."""
    for field in tensors(state):
        if not field.is_floating_point():
            field.fill_(position)


def tensors(state: Any) -> Iterator[Tensor]:
    """Yield the tensors of a mixer's state, or of a model's."""
    if isinstance(state, Tensor):
        yield state
    else:
        for part in state:
            yield from tensors(part)
