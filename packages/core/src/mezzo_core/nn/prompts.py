"""Prefill: pads prompts, and runs a model over them."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.lm import LM

Read = Callable[[Tensor, Any, Tensor | None], tuple[Tensor, Any]]
"""Takes tokens (B, T), a state, and the real tokens of each row (B,) or None for all. Returns the
last logits (B, 1, vocab) and the state after the tokens."""


def read_prompts(
    model: LM,
    prompts: Sequence[Sequence[int]],
    size: int | None = None,
    state: Any = None,
    read: Read | None = None,
) -> tuple[Tensor, Any]:
    """Run prompts, `size` tokens at a time; return the last logits (B, vocab) and the state.

    Args:
        model: in evaluation mode.
        prompts: their tokens.
        size: None runs all at once.
        state: before the prompts: one row for all of them, or one for each.
        read: runs each segment; None runs it through the model.
    """
    read = read or partial(_read, model)
    tokens, lengths = _pad(prompts, next(model.parameters()).device)
    size = size or tokens.shape[1]
    if state is None:
        state = model.init_state(len(tokens))
    elif len(tree_leaves(state)[0]) != len(tokens):
        state = model.select(state, [0] * len(tokens))
    logits = None
    for start in range(0, tokens.shape[1], size):
        segment = tokens[:, start : start + size]
        real = None if lengths is None else (lengths - start).clamp(0, segment.shape[1])
        found, state = read(segment, state, real)
        if logits is None or real is None:
            logits = found
        else:
            logits = torch.where((real > 0)[:, None, None], found, logits)
    assert logits is not None  # no prompt is empty
    return logits[:, -1], state


def _read(model: LM, tokens: Tensor, state: Any, lengths: Tensor | None) -> tuple[Tensor, Any]:
    return model(tokens, state, lengths=lengths, last_only=True)


class SegmentGraph:
    """Prefills a model whose states have a fixed size; on a GPU, by one CUDA graph.

    Each segment is padded to the same shape, so one graph serves prompts of any length.
    """

    def __init__(self, model: LM, num_rows: int, size: int) -> None:
        """Take the shape of a segment, (B, T)."""
        self.model = model
        self.state = model.reserve(model.init_state(num_rows), 0)  # each tensor in its own memory
        device = next(model.parameters()).device
        self.tokens = torch.zeros(num_rows, size, dtype=torch.int64, device=device)
        self.lengths = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._graphs = Graphs(device)

    def read_prompts(
        self, prompts: Sequence[Sequence[int]], state: Any = None
    ) -> tuple[Tensor, Any]:
        """Do what `read_prompts` does, for at most B prompts.

        The state has B rows: first those of the prompts, then unused ones. The next call overwrites
        it.
        """
        rows, size = self.tokens.shape
        padded = [*prompts, *[[]] * (rows - len(prompts))]
        logits, after = read_prompts(self.model, padded, size, state, self._read)
        return logits[: len(prompts)], after

    def _read(self, tokens: Tensor, state: Any, lengths: Tensor | None) -> tuple[Tensor, Any]:
        T = tokens.shape[1]
        self.tokens[:, :T] = tokens
        if lengths is None:
            self.lengths.fill_(T)
        else:
            self.lengths.copy_(lengths)
        if state is not self.state:
            self._put(state)
        return self._graphs.run(SegmentGraph._run, self).clone(), self.state

    def _run(self) -> Tensor:
        logits, after = _read(self.model, self.tokens, self.state, self.lengths)
        self._put(after)
        return logits

    def _put(self, state: Any) -> None:
        torch._foreach_copy_(tree_leaves(self.state), tree_leaves(state))


def _pad(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Return the prompts (B, T), padded on the right, and their lengths (None if all are T)."""
    sizes = [len(prompt) for prompt in prompts]
    longest = max(sizes)
    rows = [[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts]
    tokens = torch.tensor(rows, dtype=torch.int64, device=device)
    if min(sizes) == longest:
        return tokens, None
    return tokens, torch.tensor(sizes, dtype=torch.int64, device=device)
