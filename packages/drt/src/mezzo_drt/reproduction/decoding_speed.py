"""Times how models decode after a prompt, and how they read long texts."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from mezzo_core.nn import Decoder, Sampler
from mezzo_core.nn.lm import LM
from mezzo_core.reproduction.generation_speed import fill
from mezzo_core.reproduction.timing import now, peak_gb
from torch.utils._pytree import tree_leaves

from mezzo_drt.stack import DRT

FIRST = 64
"""Tokens of the first segment of a prompt or a text."""


@dataclass(frozen=True)
class Decoding:
    """What a token costs; `peak_gb`, weights included, is None on a CPU."""

    ms: float
    state_gb: float
    host_gb: float
    peak_gb: float | None


@dataclass(frozen=True)
class Reading:
    """What it takes to read a text; `peak_gb`, weights included, is None on a CPU."""

    seconds: float
    host_gb: float
    peak_gb: float | None


@torch.inference_mode()
def time_decoding(
    lm: LM, prompt: int, new_tokens: int, segment: int, *, warmup: int, passes: int
) -> list[Decoding]:
    """Time the tokens that follow a prompt of so many random ones, in passes one after another.

    The prompt is run in segments. Each pass has `new_tokens`; `warmup` tokens come before them all.
    """
    state = _prompted(lm, prompt, warmup + passes * new_tokens, segment)
    device = lm.embed.weight.device
    held, hosted = _bytes(state, device)
    decoder = Decoder(lm, state, torch.zeros(1, dtype=torch.int64, device=device), Sampler())

    def run(count: int) -> float:
        """Return the seconds of so many steps."""
        start = now(device)
        for _ in range(count):
            decoder.step()
        return now(device) - start

    run(warmup)
    _forget_peak(device)
    found = []
    for _ in range(passes):
        ms = 1e3 * run(new_tokens) / new_tokens
        found.append(Decoding(ms, held / 1e9, hosted / 1e9, peak_gb(device)))
    return found


@torch.inference_mode()
def time_reading(lm: LM, count: int, segment: int) -> Reading:
    """Time a pass over a text of so many tokens, after its first segments once."""
    device = lm.embed.weight.device
    read(lm, min(count, 3 * segment), segment)
    _forget_peak(device)
    start = now(device)
    state = read(lm, count, segment)
    seconds = now(device) - start
    return Reading(seconds, _bytes(state, device)[1] / 1e9, peak_gb(device))


def read(lm: LM, count: int, segment: int) -> Any:
    """Return the state after so many random tokens, which are run in segments."""
    state = lm.init_state(1)
    # Attention to a cache has no kernel to compile, nor have so few tokens as the first ones.
    borders = (0, *range(FIRST, count, segment), count)
    for begin, end in pairwise(borders):
        tokens = torch.randint(lm.vocab_size, (1, end - begin), device=lm.embed.weight.device)
        state = lm(tokens, state, last_only=True).state
    return state


def _prompted(lm: LM, prompt: int, room: int, segment: int) -> Any:
    """Return a state that has seen a prompt, with room for more tokens."""
    if isinstance(lm.stack, DRT):
        return lm.reserve(read(lm, prompt, segment), room)
    state = lm.reserve(lm.init_state(1), prompt + room)
    fill(state, prompt)  # random values decode as fast
    return state


def _bytes(state: Any, device: torch.device) -> tuple[int, int]:
    """Return a state's bytes on the device and elsewhere."""
    leaves = tree_leaves(state)
    there = sum(t.nbytes for t in leaves if t.device.type == device.type)
    return there, sum(t.nbytes for t in leaves) - there


def _forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
