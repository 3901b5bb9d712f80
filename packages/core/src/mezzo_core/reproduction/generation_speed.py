"""The speed of generation: a layer's step, a model's most tokens a second, and its latency."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.decoder import Decoder
from mezzo_core.nn.lm import LM
from mezzo_core.nn.sampler import Sampler
from mezzo_core.reproduction.layer_speed import Layer
from mezzo_core.reproduction.timing import CAPTURE_WARMUP, Timing, attempt, captured, measure, now

BATCH_STEP = 8  # batches are multiples of it; a prefill takes 1, 2, 4 or 8 rows, which divide them
MARGIN = 0.88  # share of the memory for states; the rest is for activations and a prefill
PREFILL_TOKENS = 16_384  # about how many are prefilled at once; more would only cost memory


@torch.no_grad()
def time_step(
    layer: Layer, B: int, position: int, *, passes: int = 3, seconds: float = 0.05
) -> list[Timing]:
    """Time a step of a layer for B rows that have all seen `position` tokens.

    The state is random: its values do not change the time, and a prefill of a large batch would not
    fit. The host's work before a step (`before_step`) is not timed. The layer decodes in the dtype
    of its weights.

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

    # The warm-up steps before the capture run on the empty state.
    step = captured(lambda: layer.step(x, state), weight.device)
    fill(state, position)
    once = partial(measure, step, weight.device, seconds=seconds, warmup=1, before=back)
    return [once() for _ in range(passes)]


@dataclass(frozen=True)
class Throughput:
    """How fast a batch of B rows generates."""

    tokens_per_second: float  # the new tokens of all rows over the time of their steps
    with_prompt: float  # over that of the prompts too
    B: int
    prefill_ms: float  # of the prompts
    decode_ms: tuple[float, ...]  # of a step at the first, the middle and the last position


def time_throughput(
    model: LM,
    context: int,
    new_tokens: int,
    *,
    max_batch: int = 4096,
    passes: int = 3,
    seconds: float = 0.05,
) -> list[Throughput]:
    """Time generation at the largest batch that fits, of at most `max_batch`, in some passes.

    A sequence has `context` tokens in the end, its prompt all but the new ones. The model is in
    evaluation mode, with weights of the dtype to generate in.

    Raises:
        torch.OutOfMemoryError: if not even BATCH_STEP rows fit.
    """
    batch = largest_batch(model, context, max_batch)
    while True:
        found = attempt(partial(_time, model, batch, context, new_tokens, passes, seconds))
        if not isinstance(found, str):
            return found
        if batch == BATCH_STEP:
            raise torch.OutOfMemoryError(f"{batch} sequences do not fit")
        batch = max(BATCH_STEP, batch * 7 // 8 // BATCH_STEP * BATCH_STEP)


def largest_batch(model: LM, context: int, max_batch: int) -> int:
    """Return the largest batch whose state fits, by the model's `state_bytes`."""
    fits = MARGIN * free_memory(model.embed.weight.device) / model.state_bytes(context)
    return max(BATCH_STEP, int(min(fits, max_batch)) // BATCH_STEP * BATCH_STEP)


@torch.no_grad()
def _time(
    model: LM, batch: int, context: int, new_tokens: int, passes: int, seconds: float
) -> list[Throughput]:
    """Time the prompts of a batch, and steps at three positions: their time grows linearly."""
    device, prompt = model.embed.weight.device, context - new_tokens
    rows = min(BATCH_STEP, 2 ** max(0, (PREFILL_TOKENS // prompt).bit_length() - 1))
    state = model.reserve(model.init_state(batch), context)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    prompts = torch.randint(model.vocab_size, (rows, prompt), device=device)

    def prefill() -> None:  # of a few rows, with copying their state into that of all rows
        output = model(prompts, model.init_state(rows), last_only=True)
        few = tree_leaves(model.reserve(output.state, new_tokens))
        for part, whole in zip(few, tree_leaves(state), strict=True):
            whole[:rows].copy_(part)

    def back(position: int) -> None:
        rewind(state, position)
        model.before_step(state)

    step = captured(lambda: tokens.copy_(model.step(tokens, state).argmax(-1)), device)
    fill(state, prompt)
    results = []
    for _ in range(passes):
        prefill_ms = measure(prefill, device, seconds=0.0, warmup=1, least=2).ms * batch / rows
        decode_ms = tuple(
            measure(step, device, seconds=seconds, warmup=1, before=partial(back, position)).ms
            for position in (prompt, prompt + new_tokens // 2, context - 1)
        )
        new, steps_ms = batch * new_tokens, new_tokens * fmean(decode_ms)
        speeds = new / steps_ms * 1e3, new / (prefill_ms + steps_ms) * 1e3
        results.append(Throughput(*speeds, batch, prefill_ms, decode_ms))
    return results


@dataclass(frozen=True)
class Latency:
    """How long one sequence takes: its prompt, and all until its last token."""

    seconds: float
    prompt_ms: float


@torch.inference_mode()
def time_latency(
    model: LM, prompt: int, new_tokens: Sequence[int], *, passes: int = 3
) -> dict[int, list[Latency]]:
    """Time greedy generation of one sequence, the capture of its CUDA graph included.

    The model is in evaluation mode, with weights of the dtype to generate in. `new_tokens` are
    counts of 2 or more after the prompt; all come from the same passes.
    """
    _generate(model, prompt, (2, 4))  # compiles kernels, loads libraries
    found = [_generate(model, prompt, new_tokens) for _ in range(passes)]
    return {N: [Latency(seconds[N], 1e3 * seconds[0]) for seconds in found] for N in new_tokens}


def _generate(model: LM, prompt: int, marks: Sequence[int]) -> dict[int, float]:
    """Return the seconds from the prompt's start to its end (0), and to each count of tokens."""
    device = model.embed.weight.device
    tokens = torch.randint(model.vocab_size, (1, prompt), device=device)

    start, seconds = now(device), {}
    logits, state = model(tokens, model.init_state(1), last_only=True)
    state = model.reserve(state, max(marks))
    decoder = Decoder(model, state, logits[:, -1].argmax(-1), Sampler())
    seconds[0] = now(device) - start
    for count in range(2, max(marks) + 1):  # the prompt gave the first
        decoder.step()
        if count in marks:
            seconds[count] = now(device) - start
    return seconds


def fill(state: Any, position: int) -> None:
    """Make a reserved state random, as if each row had seen `position` tokens."""
    rewind(state, position)
    for field in tree_leaves(state):
        if field.is_floating_point():
            field.normal_()


def rewind(state: Any, position: int) -> None:
    """Set the lengths of a state of a layer or a model.

    Raises:
        ValueError: if the state has integers besides the rows' lengths, such as the indices of
            chunks that it retrieved: these cannot be made up.
    """
    numbers = [field for field in tree_leaves(state) if not field.is_floating_point()]
    if any(field.ndim != 1 for field in numbers):
        raise ValueError("only a state whose integers are the lengths of its rows can be timed")
    for field in numbers:
        field.fill_(position)


def free_memory(device: torch.device) -> float:
    """Return the bytes that a state may take on a GPU, a margin left out; infinite on a CPU."""
    if device.type != "cuda":
        return math.inf
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free - total // 50
