"""The time of one decoding step of a layer at a position, in a CUDA graph."""

import math
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mezzo_core.bench.layer import Layer
from mezzo_core.bench.timing import CAPTURE_WARMUP, Timing, captured, measure


@torch.no_grad()
def time_step(
    layer: Layer, B: int, position: int, *, passes: int = 3, seconds: float = 0.05
) -> list[Timing]:
    """Time a step of a layer for B rows that have all seen `position` tokens.

    The state is filled with random numbers, as its values do not change the time, and a prefill of
    a large batch would not fit. The host's work before a step (`before_step`) is not timed.

    Args:
        layer: with weights of the dtype in which it decodes; check it first (`check_layer`).
        B: the rows.
        position: of the token that they decode, the first is 0.
        passes: how many timings to return.
        seconds: time of each.

    Raises:
        torch.OutOfMemoryError: if the state does not fit into the GPU, which is not even tried.
    """
    mixer, weight = layer.mixer, layer.norm.weight
    room = position + CAPTURE_WARMUP + 1
    if B * mixer.state_bytes(room) > free_memory(weight.device):
        raise torch.OutOfMemoryError("the state is larger than the free memory")
    x = torch.randn(B, 1, len(weight), device=weight.device, dtype=weight.dtype)
    state = mixer.reserve(mixer.init_state(B), room)

    def back() -> None:
        rewind(state, position)
        mixer.before_step(state)

    # The steps before the capture run at the start of the state.
    step = captured(lambda: layer.step(x, state), weight.device)
    fill(state, position)
    return [
        measure(step, weight.device, seconds=seconds, warmup=1, before=back) for _ in range(passes)
    ]


def fill(state: Any, position: int) -> None:
    """Fill a reserved state with random numbers, as if each row had seen `position` tokens."""
    for field in tree_leaves(state):
        if field.is_floating_point():
            field.normal_()
    rewind(state, position)


def rewind(state: Any, position: int) -> None:
    """Set the lengths of a state of a layer or a model, which are its only integer tensors."""
    for field in tree_leaves(state):
        if not field.is_floating_point():
            field.fill_(position)


def free_memory(device: torch.device) -> float:
    """Return the bytes that a state may take on a GPU, a margin left out; infinite on a CPU."""
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free - total // 50
