"""Checks of the arguments of `generate`; each raises a ValueError that names the argument."""

from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo_core.memory import available_memory
from mezzo_core.nn.lm import LM
from mezzo_core.nn.sharded import check_whole

FLOAT = torch.finfo(torch.float32)
"""The dtype in which logits are changed and sampled."""


def check_prefix(state: Any, num_prompts: int, num_rows: int | None) -> None:
    """Check that a state has one row or, without `num_rows`, one for each prompt."""
    leaves = tree_leaves(state)
    rows = len(leaves[0]) if leaves and isinstance(leaves[0], Tensor) else 0
    if rows not in (1, num_prompts):
        raise ValueError(f"state must have 1 row or {num_prompts}, as the prompts, got {rows}")
    if rows != 1 and num_rows is not None:
        raise ValueError(f"state must have 1 row where num_rows is given, got {rows}")


def check_prompts(prompts: Sequence[Sequence[int]], vocab_size: int) -> None:
    """Check that there are prompts, and that each has tokens of the vocabulary."""
    if _length(prompts) == 0:  # an array has no truth value
        raise ValueError("prompts must hold at least one prompt, got none")
    for i, prompt in enumerate(prompts):
        if _length(prompt) == 0:
            raise ValueError(f"prompts[{i}] is empty: give at least one token to continue from")
        for token in prompt:
            if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
                raise ValueError(
                    f"prompts[{i}] must be a list of whole numbers in [0, {vocab_size}), as a "
                    f"tensor's tolist() gives, got {token!r}"
                )


def _length(given: Any) -> int:
    try:
        return len(given)
    except TypeError:
        raise ValueError(
            f"prompts must hold a list of token ids for each prompt, got {given!r}"
        ) from None


def check_count(name: str, value: Any) -> None:
    """Check that a value is an int of 1 or more."""
    is_count = isinstance(value, Integral) and not isinstance(value, bool)
    if not is_count or not 1 <= int(value) < 2**31:
        raise ValueError(f"{name} must be from 1 to 2^31 - 1, got {value!r}")


def check_memory(name: str, value: int, model: LM, num_rows: int, num_tokens: int) -> None:
    """Check that rows of this length and their logits fit into the free memory."""
    # 24 bytes a logit: float64 for exact sums, or float32 sorted with its index, and copies.
    of_a_row = model.state_bytes(num_tokens) + 24 * model.vocab_size
    free = available_memory(next(model.parameters()).device)
    if num_rows * of_a_row > free:
        raise ValueError(
            f"{name} {value} takes {num_rows} rows of {num_tokens} tokens, which need "
            f"{num_rows * of_a_row / 1e9:,.1f} GB of memory; {free / 1e9:,.1f} GB are free"
        )


def check_seed(seed: Any, num_rows: int) -> None:
    """Check a seed, or one for each row."""
    seeds = seed if isinstance(seed, Sequence) and not isinstance(seed, str | bytes) else [seed]
    if seeds is seed and len(seed) != num_rows:
        raise ValueError(f"seed must be one number or {num_rows}, one a row, got {len(seed)}")
    for its in seeds:
        is_seed = isinstance(its, Integral) and 0 <= int(its) < 2**63
        if not is_seed and (its is not None or seeds is seed):
            raise ValueError(f"seed must be from 0 to 2^63 - 1, got {its!r}")


def check_tokens(name: str, tokens: Sequence[Any], vocab_size: int) -> None:
    """Check token ids."""
    for token in tokens:
        # A tensor would be equal to no token: prompts would never stop.
        if not isinstance(token, Integral) or not 0 <= int(token) < vocab_size:
            raise ValueError(f"{name} must hold token ids in [0, {vocab_size}), got {token!r}")


def check_stops(stop_tokens: Any, vocab_size: int) -> frozenset[int]:
    """Check the tokens that end a text; return them."""
    if isinstance(stop_tokens, Integral):
        raise ValueError(f"stop_tokens must be a list of token ids, got {stop_tokens}")
    stops = tuple(stop_tokens)  # an iterator, such as map(...), can be read only once
    check_tokens("stop_tokens", stops, vocab_size)
    return frozenset(map(int, stops))


def check_penalty(value: Any) -> None:
    """Check a repetition penalty."""
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not FLOAT.tiny <= value <= FLOAT.max:
        raise ValueError(f"repetition_penalty must be above 0 and finite in float32, got {value!r}")


def check_bias(bias: Any, vocab_size: int) -> Mapping[int, float]:
    """Check what is added to logits; return it."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise ValueError(f"logit_bias must map token ids to numbers, got {type(bias).__name__}")
    check_tokens("logit_bias", list(bias), vocab_size)
    for token, value in bias.items():
        is_number = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number or (value != -float("inf") and not abs(value) <= FLOAT.max):
            raise ValueError(
                f"logit_bias must be finite in float32 or -inf, got {value!r} for {token}"
            )
    if len(bias) == vocab_size and all(value == -float("inf") for value in bias.values()):
        raise ValueError("logit_bias must leave a token that is not -inf")
    return bias


def check_assistant(
    model: LM, assistant: Any, penalty: float, state: Any, num_samples: int, num_rows: int | None
) -> None:
    """Check an assistant, and refuse options that it does not support."""
    if not isinstance(assistant, LM):
        raise ValueError(f"assistant must be an LM, got {type(assistant).__name__}")
    check_whole(assistant)
    if assistant.vocab_size != model.vocab_size:
        raise ValueError(
            f"assistant must have the vocabulary of the model, {model.vocab_size} tokens, "
            f"got {assistant.vocab_size}"
        )
    if penalty != 1 or state is not None or num_samples != 1 or num_rows is not None:
        raise ValueError(
            "assistant goes without repetition_penalty, state, num_samples and num_rows"
        )
