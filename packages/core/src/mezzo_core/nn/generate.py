"""Generation: continues a batch of prompts, one token of every prompt a step.

On a GPU a step is one CUDA graph, captured once in each call (or once for many, see `keep_graphs`)
and replayed. On a CPU it is eager.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any

import torch
from torch import Tensor, nn

from mezzo_core.nn.assisted import assisted_tokens
from mezzo_core.nn.decoder import Decoder, without_rollback
from mezzo_core.nn.ends import Ends
from mezzo_core.nn.generate_arguments import (
    check_assistant,
    check_bias,
    check_count,
    check_memory,
    check_penalty,
    check_prefix,
    check_prompts,
    check_seed,
    check_stops,
)
from mezzo_core.nn.kept_graphs import lent
from mezzo_core.nn.lm import LM
from mezzo_core.nn.prompts import read_prompts
from mezzo_core.nn.rewinding import Kept
from mezzo_core.nn.sampler import Generators, LogitRules, Sampler, row_generators
from mezzo_core.nn.sharded import check_whole
from mezzo_core.nn.turns import Turns


def generate(
    model: LM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_tokens: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    prefill_tokens: int | None = None,
    state: Any = None,
    num_samples: int = 1,
    num_rows: int | None = None,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    stop: Callable[[Sequence[int]], bool] | None = None,
    assistant: LM | None = None,
    num_drafted: int = 15,
) -> list[list[int]]:
    """Continue every prompt, and return the new tokens of each.

    The prompts run as one batch. They may differ in length: padding does not influence the results.

    Args:
        model: the model; generation runs on its device and in its dtype. FSDP2 must not
            have sharded it.
        prompts: token ids, at least one for each prompt.
        max_new_tokens: the most tokens to add to each prompt, at least 1.
        temperature: 0 takes the most likely token. Otherwise the logits are divided by it and a
            token is sampled.
        top_k: sample among the k most likely tokens only.
        top_p: sample among the fewest tokens whose probabilities sum to p or more (Holtzman et
            al., "The Curious Case of Neural Text Degeneration", 2020). A sum may miss p by a
            millionth of it: float32 is no more exact. With `top_k`, both apply.
        min_p: sample among the tokens that are at least p times as likely as the likeliest (Nguyen
            et al., "Turning Up the Heat: Min-p Sampling", 2025).
        stop_tokens: a prompt stops at the first of these tokens, which is not returned.
        seed: makes sampling repeatable; None draws from torch's global generator. With a seed for
            each row, what a row draws does not depend on the others.
        prefill_tokens: run this many tokens of the prompts at a time, to bound the memory of long
            prompts; None runs all at once. The results are the same up to rounding.
        state: the state before the prompts, which is not changed: one row for all of them, such as
            a common beginning that was read once, or one row for each prompt.
        num_samples: how many continuations of each prompt to return, one after the other. The
            prompt is read once, unless `num_rows` is given.
        num_rows: how many continuations run at a time: when one ends, the next prompt takes its row
            of the batch. None runs all at once, until the last one ends.
        repetition_penalty: above 0. For tokens in the prompt or its continuation, positive logits
            are divided by it, negative ones multiplied. Tokens in `state` do not count.
        logit_bias: added to the logits of single tokens; -inf forbids one.
        stop: called with a prompt's new tokens after each of them; the continuation ends when it
            returns True (`mezzo_core.data.stop_texts`).
        assistant: a smaller model with the same vocabulary. It proposes several tokens, and the
            model checks them at once. Up to rounding, the result is the same as without it, also
            when sampling. It excludes a penalty, several samples, `state` and `num_rows`.
        num_drafted: the most tokens that the assistant proposes at a time. Fewer are proposed while
            the model rejects many.

    Raises:
        ValueError: if an argument is out of range (the message names it), the samples need more
            memory than is free, or the model's logits are NaN.
        TypeError: if an argument has the wrong type.
    """
    steps = stream(**locals())  # it has the same arguments
    rows: list[list[int]] = [[] for _ in range(len(prompts) * num_samples)]
    for step in steps:
        for row, token in zip(rows, step, strict=True):
            if token is not None:
                row.append(token)
    return rows


def stream(
    model: LM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    stop_tokens: Collection[int] = (),
    seed: int | Sequence[int] | None = None,
    prefill_tokens: int | None = None,
    state: Any = None,
    num_samples: int = 1,
    num_rows: int | None = None,
    repetition_penalty: float = 1.0,
    logit_bias: Mapping[int, float] | None = None,
    stop: Callable[[Sequence[int]], bool] | None = None,
    assistant: LM | None = None,
    num_drafted: int = 15,
) -> Iterator[list[int | None]]:
    """Yield one list a step: each prompt's new token, or None once that prompt has stopped.

    With `num_rows`, prompts that wait for their turn have None too.

    The arguments and errors are those of `generate`. Errors about arguments are raised at the call,
    not at the first step. The model stays in evaluation mode until all its streams have ended or
    are closed; then its earlier mode is restored.
    """
    sampler = Sampler(temperature, top_k, top_p, min_p)
    check_whole(model)
    check_prompts(prompts, model.vocab_size)
    check_count("max_new_tokens", max_new_tokens)
    check_count("num_samples", num_samples)
    check_count("num_drafted", num_drafted)
    if prefill_tokens is not None:
        check_count("prefill_tokens", prefill_tokens)
    if num_rows is not None:
        check_count("num_rows", num_rows)
    num_results = len(prompts) * num_samples
    if num_samples > 1:
        length = max(map(len, prompts)) + max_new_tokens
        at_once = min(num_rows or num_results, num_results)
        check_memory("num_samples", num_samples, model, at_once, length)
    check_seed(seed, num_results)
    stops = check_stops(stop_tokens, model.vocab_size)
    check_penalty(repetition_penalty)
    bias = check_bias(logit_bias, model.vocab_size)
    if stop is not None and not callable(stop):
        raise ValueError(f"stop must be a function of the new tokens, got {stop!r}")
    if state is not None:
        check_prefix(state, len(prompts), num_rows)
    device = next(model.parameters()).device
    every = [prompt for prompt in prompts for _ in range(num_samples)]
    end = Ends(num_results, stops, stop)
    if assistant is None and num_rows is not None and num_rows < num_results:
        plain = without_rollback(model)
        if plain is not model and isinstance(state, Kept):
            state = state.state
        turns = Turns(
            plain, every, end, num_rows, max_new_tokens, sampler, seed,
            float(repetition_penalty), bias, prefill_tokens, state,
        )  # fmt: skip
        return _in_turn(model, turns)
    rules = LogitRules(every, float(repetition_penalty), bias, model.vocab_size, device)
    if assistant is None:
        new = _new_tokens(
            model, prompts, prefill_tokens, max_new_tokens, sampler,
            row_generators(seed, device), state, num_samples, rules,
        )  # fmt: skip
        return _steps((model,), new, end)
    check_assistant(model, assistant, repetition_penalty, state, num_samples, num_rows)
    new = assisted_tokens(
        model,
        assistant,
        prompts,
        max_new_tokens=max_new_tokens,
        num_drafted=num_drafted,
        sampler=sampler,
        generator=row_generators(seed, device),
        rules=rules,
        prefill_tokens=prefill_tokens,
    )
    return _steps((model, assistant), new, end)


@torch.inference_mode()
def _steps(
    models: Sequence[LM], new_tokens: Iterator[Tensor], ends: Ends
) -> Iterator[list[int | None]]:
    """Yield the new tokens of the rows that have not ended, with the models in evaluation mode."""
    with ExitStack() as stack:
        for model in models:
            stack.enter_context(evaluation(model))
        for new in new_tokens:
            step = [ends.take(row, token) for row, token in enumerate(new.tolist())]
            if all(token is None for token in step):
                return
            yield step
            if not any(ends.running):
                return


def _in_turn(model: LM, turns: Turns) -> Iterator[list[int | None]]:
    """Yield the steps in which a prompt gets a token, with the model in evaluation mode."""
    with evaluation(model):
        for step in turns.steps():
            if any(token is not None for token in step):
                yield step


@dataclass
class _Held:
    training: list[nn.Module]  # what was in training mode before
    streams: int = 0


_held: dict[LM, _Held] = {}
"""The models that streams hold in evaluation mode."""
_held_lock = RLock()  # reentrant: garbage that is collected meanwhile may close a stream


@contextmanager
def evaluation(model: LM) -> Iterator[None]:
    """Hold the model in evaluation mode, until the last such context of the model ends."""
    with _held_lock:
        held = _held.setdefault(model, _Held([part for part in model.modules() if part.training]))
        held.streams += 1
        model.eval()
    try:
        yield
    finally:
        with _held_lock:
            held.streams -= 1
            if not held.streams:
                del _held[model]
                for part in held.training:
                    part.training = True


@torch.inference_mode()
def _new_tokens(
    model: LM, prompts: Sequence[Sequence[int]], prefill_tokens: int | None, max_new_tokens: int,
    sampler: Sampler, generator: Generators, state: Any, num_samples: int, rules: LogitRules,
) -> Iterator[Tensor]:  # fmt: skip
    """Yield the next token of every row, (B,), also of rows that have ended."""
    logits, state = read_prompts(model, prompts, prefill_tokens, state)
    if num_samples > 1:
        rows = torch.arange(len(prompts), device=logits.device).repeat_interleave(num_samples)
        logits, state = logits[rows], model.select(state, rows)
    new = sampler(rules(logits), generator)
    rules.note_(new)
    yield new
    if max_new_tokens == 1:
        return
    room = model.reserve(state, max_new_tokens - 1)
    del state  # the prompt's own copy
    with lent(model, Decoder(model, room, new, sampler, generator, rules)) as decoder:
        for _ in range(max_new_tokens - 1):
            yield decoder.step()
