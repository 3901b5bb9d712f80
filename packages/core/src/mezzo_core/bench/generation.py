"""The speed of generation: the most tokens a second, and the latency of one sequence."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import torch
from torch.utils._pytree import tree_leaves

from mezzo_core.bench.decode import fill, free_memory, rewind
from mezzo_core.bench.timing import attempt, captured, measure
from mezzo_core.nn.generate import Decoder, Sampler
from mezzo_core.nn.lm import LM

BATCH_STEP = 8  # batches are multiples of it; a prefill takes 1, 2, 4 or 8 rows, which divide them
MARGIN = 0.88  # share of the memory for states; the rest is for activations and a prefill
PREFILL_TOKENS = 16_384  # about how many are prefilled at once; more would only cost memory


@dataclass(frozen=True)
class Throughput:
    """How fast a batch of B rows generates.

    `tokens_per_second` counts the new tokens of all rows over the time of their steps,
    `with_prompt` over that of the prompts (`prefill_ms`) too. `decode_ms` is the time of a step at
    the first, the middle and the last position.
    """

    tokens_per_second: float
    with_prompt: float
    B: int
    prefill_ms: float
    decode_ms: tuple[float, ...]


def time_throughput(
    model: LM,
    context: int,
    new_tokens: int,
    *,
    max_batch: int = 4096,
    passes: int = 3,
    seconds: float = 0.05,
) -> list[Throughput]:
    """Time generation at the largest batch that fits, in each of some passes.

    Args:
        model: in evaluation mode, with weights of the dtype to generate in.
        context: tokens of a sequence in the end; the prompt has context - new_tokens.
        new_tokens: of each sequence.
        max_batch: for a model with a small state, a larger batch no longer helps.
        passes: how many results to return.
        seconds: for each timing.

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
    """Time the prompts and the steps of a batch.

    The prefill is timed for a few rows, together with copying their state into that of all rows,
    and is multiplied by the number of such groups. The time of a step grows linearly with the
    position.
    """
    device, prompt = model.embed.weight.device, context - new_tokens
    rows = min(BATCH_STEP, 2 ** max(0, (PREFILL_TOKENS // prompt).bit_length() - 1))
    state = model.reserve(model.init_state(batch), context)
    tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)
    prompts = torch.randint(model.vocab_size, (rows, prompt), device=device)

    def prefill() -> None:
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

    Args:
        model: in evaluation mode, with weights of the dtype to generate in.
        prompt: tokens before the first new one.
        new_tokens: counts of new tokens, each at least 2; all come from the same passes.
        passes: how many results to return for each count.
    """
    _generate(model, prompt, (2, 4))  # compiles kernels, loads libraries
    found = [_generate(model, prompt, new_tokens) for _ in range(passes)]
    return {N: [Latency(seconds[N], 1e3 * seconds[0]) for seconds in found] for N in new_tokens}


def _generate(model: LM, prompt: int, marks: Sequence[int]) -> dict[int, float]:
    """Return the seconds from the prompt's start to its end (0), and to each count of tokens."""
    device = model.embed.weight.device
    tokens = torch.randint(model.vocab_size, (1, prompt), device=device)
    start, seconds = _now(device), {}
    logits, state = model(tokens, model.init_state(1), last_only=True)
    state = model.reserve(state, max(marks))
    decoder = Decoder(model, state, logits[:, -1].argmax(-1), Sampler())
    seconds[0] = _now(device) - start
    for count in range(2, max(marks) + 1):  # the prompt gave the first
        decoder.step()
        if count in marks:
            seconds[count] = _now(device) - start
    return seconds


def _now(device: torch.device) -> float:
    """Return the clock's seconds when the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
