"""Continuous batching: when a prompt's continuation ends, the next prompt takes its row.

Decoding stops while prompts are read, and reading a few takes about as long as reading one. So the
next prompts are read together, once a quarter of the rows is free or there is a row for each prompt
left. On a GPU, if states have a fixed size, one CUDA graph reads a quarter of the rows at a time.
"""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo_core.nn.decoder import Decoder
from mezzo_core.nn.ends import Ends
from mezzo_core.nn.lm import LM
from mezzo_core.nn.prompts import SegmentGraph, read_prompts
from mezzo_core.nn.sampler import LogitRules, Sampler, row_generators
from mezzo_core.nn.state import grows, put_rows_

_TOKENS_AT_ONCE = 1024
"""Tokens of all prompts that are read at a time, padding included, without `prefill_tokens`."""


@dataclass
class Turns:
    """Continues many prompts in a batch of few rows.

    When a row gets another prompt, the batch's buffers stay in place, so the same CUDA graph goes
    on decoding in them.

    Attributes:
        model: in evaluation mode.
        prompts: tokens of each.
        ends: of each prompt.
        num_rows: of the batch, at most the number of prompts.
        max_new_tokens: this and the fields after it hold what `generate` is asked for.
        before: the state before all prompts, of one row; None if they begin the sequence.
    """

    model: LM
    prompts: Sequence[Sequence[int]]
    ends: Ends
    num_rows: int
    max_new_tokens: int
    sampler: Sampler
    seed: int | Sequence[int] | None
    penalty: float
    bias: Mapping[int, float]
    prefill_tokens: int | None
    before: Any

    @torch.inference_mode()
    def __post_init__(self) -> None:
        self.device = next(self.model.parameters()).device
        self.room = max(map(len, self.prompts)) + self.max_new_tokens
        self.overwritten = self.model.stack.overwritten()
        self.waiting = deque(range(len(self.prompts)))
        self.here: list[int | None] = [None] * self.num_rows  # the prompt of each row
        self.left = [0] * self.num_rows  # the steps that each row still has room for
        first = self.seed[: self.num_rows] if isinstance(self.seed, Sequence) else self.seed
        self.generators = row_generators(first, self.device)
        start = self.before if self.before is not None else self.model.init_state(1)
        self.start = self.model.reserve(start, self.room)
        self.quarter = -(-self.num_rows // 4)
        self.in_graph: SegmentGraph | None = None
        if self.device.type == "cuda" and not grows(self.model.init_state(1)):
            size = self.prefill_tokens or max(_TOKENS_AT_ONCE // self.quarter, 64)
            self.in_graph = SegmentGraph(self.model, self.quarter, size)

    @torch.inference_mode()
    def steps(self) -> Iterator[list[int | None]]:
        """Yield lists of each prompt's next token, None for prompts that get none now."""
        state = self.model.select(self.start, [0] * self.num_rows)
        tokens = torch.zeros(self.num_rows, dtype=torch.int64, device=self.device)
        rules = self._rules([[0]] * self.num_rows)  # these rows have no prompts yet
        decoder = Decoder(self.model, state, tokens, self.sampler, self.generators, rules)
        while True:
            while self._is_time():
                yield self._refill(decoder)
            if self.here.count(None) == self.num_rows:
                return
            self._rest(decoder)
            yield self._take(decoder.step().tolist(), range(self.num_rows))

    def _is_time(self) -> bool:
        """Tell whether to read the next prompts now."""
        free = self.here.count(None)
        return bool(self.waiting) and free >= min(len(self.waiting), self.quarter)

    def _read(self, rows: Sequence[int]) -> tuple[Tensor, Any, LogitRules]:
        """Read the next prompts into rows; return their first tokens, states and rules."""
        for row in rows:
            self.here[row] = self.waiting.popleft()
        chosen = [prompt for row in rows if (prompt := self.here[row]) is not None]
        prompts = [self.prompts[i] for i in chosen]
        generators = self.generators
        if isinstance(self.seed, Sequence) and isinstance(generators, Sequence):
            generators = [generators[row] for row in rows]
            for i, generator in zip(chosen, generators, strict=True):
                generator.manual_seed(int(self.seed[i]))
        rules = self._rules(prompts)
        if self.in_graph is None:
            logits, state = read_prompts(self.model, prompts, self.prefill_tokens, self.before)
        else:
            logits, state = self.in_graph.read_prompts(prompts, self.before)
        new = self.sampler(rules(logits), generators)
        rules.note_(new)
        left = self.room - max(map(len, prompts))
        for row in rows:
            self.left[row] = left
        return new, self.model.reserve(state, left), rules

    def _rules(self, prompts: Sequence[Sequence[int]]) -> LogitRules:
        vocab = self.model.vocab_size
        return LogitRules(prompts, self.penalty, self.bias, vocab, self.device)

    def _refill(self, decoder: Decoder) -> list[int | None]:
        """Read waiting prompts into free rows; return their first tokens."""
        free = [row for row, prompt in enumerate(self.here) if prompt is None]
        most = self.num_rows if self.in_graph is None else self.quarter
        free = free[: min(len(self.waiting), most)]
        new, state, rules = self._read(free)
        put_rows_(decoder.state, free, state, self.overwritten)
        decoder.tokens[free] = new
        if decoder.rules is not None:
            decoder.rules.put_rows_(free, rules)
        return self._take(decoder.tokens.tolist(), free)

    def _rest(self, decoder: Decoder) -> None:
        """Reset unused rows that have run out of room, since every row takes part in a step."""
        full = [row for row, left in enumerate(self.left) if left == 0]
        if full:
            state = self.model.select(self.start, [0] * len(full))
            put_rows_(decoder.state, full, state, self.overwritten)
        self.left = [left - 1 if left else self.room - 1 for left in self.left]

    def _take(self, tokens: Sequence[int], rows: Sequence[int]) -> list[int | None]:
        """Take the newest tokens of these rows; return the step's token of each prompt, or None."""
        step: list[int | None] = [None] * len(self.prompts)
        for row in rows:
            prompt = self.here[row]
            if prompt is None:
                continue
            step[prompt] = self.ends.take(prompt, tokens[row])
            is_full = len(self.ends.tokens[prompt]) == self.max_new_tokens
            if is_full or not self.ends.running[prompt]:
                self.here[row] = None
        return step
