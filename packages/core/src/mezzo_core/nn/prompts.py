"""Prompts: padded, and read by a model."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.lm import LM


def read_prompts(
    model: LM, prompts: Sequence[Sequence[int]], size: int | None = None, state: Any = None
) -> tuple[Tensor, Any]:
    """Run prompts, `size` tokens at a time; return the last logits (B, vocab) and the state.

    Args:
        model: in evaluation mode.
        prompts: their tokens.
        size: None runs all at once.
        state: after what comes before the prompts, of one row for all of them, or of one for each.
    """
    tokens, lengths = _pad(prompts, next(model.parameters()).device)
    size = size or tokens.shape[1]
    if state is None:
        state = model.init_state(len(tokens))
    elif len(tree_leaves(state)[0]) != len(tokens):
        state = model.select(state, [0] * len(tokens))
    logits = None
    for start in range(0, tokens.shape[1], size):
        segment = tokens[:, start : start + size]
        if lengths is None:
            logits, state = model(segment, state, last_only=True)
            continue
        real = (lengths - start).clamp(0, segment.shape[1])
        found, state = model(segment, state, lengths=real, last_only=True)
        has_tokens = (real > 0)[:, None, None]
        logits = found if logits is None else torch.where(has_tokens, found, logits)
    assert logits is not None  # no prompt is empty
    return logits[:, -1], state


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the prompts (B, T), padded on the right, and their lengths (None if all are T)."""
    sizes = [len(prompt) for prompt in prompts]
    longest = max(sizes)
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    if min(sizes) == longest:
        return tokens, None
    return tokens, torch.tensor(sizes, dtype=torch.int64, device=device)
