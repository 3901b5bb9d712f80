"""Assisted decoding: a small model proposes tokens, and one forward of the large one checks them.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023). What was
proposed in vain leaves no trace in a state, so that recurrent models can do it too: the large model
checks from an older state, which stays as it is, and the small one keeps what its tokens overwrite.

Where tokens are sampled, both models sample each of them by the same random numbers, those that the
large one would take alone: where they agree the token is right, and where not it is that of the
large one. So the tokens are those of sampling without an assistant, not only their distribution.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mezzo_core.nn.contract import run_eagerly
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.lm import LM
from mezzo_core.nn.prompts import read_prompts
from mezzo_core.nn.sampler import Generators, LogitRules, Sampler, draw_
from mezzo_core.nn.state import grows, only_counts


@torch.inference_mode()
def assisted_tokens(
    model: LM,
    assistant: LM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_drafted: int,
    sampler: Sampler,
    generator: Generators,
    rules: LogitRules,
    prefill_tokens: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, (B,), as the model samples it alone.

    Args:
        model: in evaluation mode, as the assistant.
        assistant: a model of the same vocabulary.
        prompts: tokens of each row.
        max_new_tokens: how many steps are yielded.
        num_drafted: m, the tokens that the assistant proposes before the model checks them.
        sampler: samples the tokens.
        generator: on the models' device.
        rules: change the logits of both models; without a penalty.
        prefill_tokens: how many tokens of the prompts run at a time; None for all.
    """
    m = num_drafted
    logits, state = read_prompts(model, prompts, prefill_tokens)
    noise = _Noise(sampler, generator, logits)
    newest = sampler(rules(logits), noise.at([0] * len(prompts)))
    rows = [[token] for token in newest.tolist()]
    target = _Target(model, state, newest, m, sampler, noise, rules)
    del state  # the prompt's own copy
    room = max_new_tokens + 2 * m  # a row that is done may have m more, and m + 1 more are read
    draft = _Draft(assistant, prompts, prefill_tokens, newest, m, room, sampler, noise, rules)
    for step in range(max_new_tokens):
        while any(len(row) <= step for row in rows):
            places = [len(row) for row in rows]
            proposed = draft.propose(target.newest, places)
            best = target.check(proposed, places)
            taken = []
            for row, found in zip(rows, torch.cat([best, proposed], 1).tolist(), strict=True):
                likely, guess = found[: m + 1], found[m + 1 :]
                right = 0
                while right < m and likely[right] == guess[right]:
                    right += 1
                # One that is done goes no further: there is no room. One that is far ahead waits.
                stays = len(row) >= max_new_tokens or len(row) > step + _LEAD
                taken.append(0 if stays else right + 1)
                row.extend(likely[: taken[-1]])
            target.take(taken)
            draft.take(taken)
        noise.forget(step)
        yield torch.tensor([row[step] for row in rows])


_LEAD = 32
"""How many tokens a row can be ahead of the slowest one: so long its random numbers are kept."""


def _width(num_drafted: int, in_graphs: bool) -> int:
    """Return the tokens of a check: in a graph 32, so that fewer are read once more."""
    return max(32 if in_graphs else 0, num_drafted + 1)


class _Noise:
    """Random numbers of all rows for each place, drawn in the order of sampling alone."""

    def __init__(self, sampler: Sampler, generator: Generators, logits: Tensor) -> None:
        """Take logits (B, vocab) for their shape; the likeliest token needs no numbers."""
        self.is_needed = sampler.temperature > 0
        self.generator, self.like = generator, logits.float()
        self.first, self.drawn = 0, list[Tensor]()  # the first place whose numbers are kept

    def at(self, places: Sequence[int]) -> Tensor | None:
        """Return the numbers of places, equally many of each row, row after row: (N, vocab)."""
        if not self.is_needed:
            return None
        while self.first + len(self.drawn) <= max(places):
            self.drawn.append(draw_(torch.empty_like(self.like), self.generator))
        each = len(places) // len(self.like)
        found = [self.drawn[place - self.first][i // each] for i, place in enumerate(places)]
        return torch.stack(found)

    def forget(self, place: int) -> None:
        """Forget the numbers of a place, which is the first that is kept."""
        del self.drawn[:1]
        self.first = place + 1


class _Target:
    """The model: checks what is proposed.

    A check reads the tokens since an older state, and what is proposed behind them. It keeps no
    state, so that nothing is to be taken back. Only where there is no place for another round does
    the model read those tokens once more, and its state after them is the older one from then on.
    What is read again is spared if all was right, or if tokens overwrite counts of tokens alone.

    Where the state keeps its size, both are CUDA graphs on a GPU.
    """

    def __init__(
        self, model: LM, state: Any, newest: Tensor, num_drafted: int, sampler: Sampler,
        noise: _Noise, rules: LogitRules,
    ) -> None:  # fmt: skip
        first, m = model.init_state(1), num_drafted
        self.model, self.sampler, self.noise, self.rules = model, sampler, noise, rules
        self.overwritten = model.stack.overwritten()
        self.is_fixed, self.is_counted = not grows(first), only_counts(first, self.overwritten)
        self.state = model.reserve(state, 0) if self.is_fixed else state
        in_graphs = self.is_fixed and newest.is_cuda
        self.run = Graphs(newest.device).run if in_graphs else run_eagerly
        self.width = _width(m, in_graphs)
        # Of each row `counts` tokens are real, the newest is the last of them; behind are others.
        self.tokens = newest.new_zeros(len(newest), self.width + 1)
        self.tokens[:, 0] = newest.clamp(min=0)
        self.counts = torch.ones_like(newest)
        self.most = [1] * len(newest)  # the same counts on the host, so that nobody waits
        self.offsets = torch.arange(m + 1, device=newest.device)
        self.drawn = noise.at([0] * (m + 1) * len(newest))  # a buffer: a graph reads it

    @property
    def newest(self) -> Tensor:
        """The newest token of each row (B,)."""
        return self.tokens.gather(1, self.counts[:, None] - 1)[:, 0]

    def check(self, proposed: Tensor, places: Sequence[int]) -> Tensor:
        """Return what comes after the newest token and after each proposed one (B, m): (B, m + 1).

        `places` are those of the first of them, of each row.
        """
        if max(self.most) + proposed.shape[1] > self.width:
            self._renew()
        self._write(proposed)
        drawn = self.noise.at([place + i for place in places for i in range(len(self.offsets))])
        if self.drawn is not None and drawn is not None:
            self.drawn.copy_(drawn)
        self.best, self.after = self.run(_Target._check, self)
        return self.best

    def take(self, taken: Sequence[int]) -> None:
        """Take so many of the m + 1 tokens that the check has found, of each row."""
        self._write(self.best.clamp(min=0))
        self.counts += torch.tensor(taken, device=self.counts.device)
        self.most = [a + b for a, b in zip(self.most, taken, strict=True)]

    def _write(self, tokens: Tensor) -> None:
        """Write tokens (B, n) behind the newest ones."""
        self.tokens.scatter_(1, self.counts[:, None] + self.offsets[: tokens.shape[1]], tokens)

    def _check(self) -> tuple[Tensor, Any]:
        logits, after = self.model(self.tokens[:, :-1], self.state)
        index = (self.counts[:, None] - 1 + self.offsets)[..., None]
        logits = self.rules(logits.gather(1, index.expand(-1, -1, logits.shape[2])))
        return self.sampler(logits.flatten(0, 1), self.drawn).view(index.shape[:2]), after

    def _renew(self) -> None:
        """Let the state be that after all tokens but the newest."""
        if min(self.most) > self.width:  # all that the check has read was right
            self._go_on(self.after)
        elif self.is_counted:
            vain = self.width + 1 - self.counts
            leaves, tree = tree_flatten(self.after)
            parts = zip(leaves, self.overwritten, strict=True)
            fewer = [x - vain.to(x.device) if on else x for x, on in parts]
            self._go_on(tree_unflatten(fewer, tree))
        else:
            self.run(_Target._read, self)
        self.tokens[:, 0] = self.newest
        self.counts.fill_(1)
        self.most = [1] * len(self.most)

    def _read(self) -> None:
        tokens, lengths = self.tokens[:, :-1], self.counts - 1
        _, after = self.model(tokens, self.state, lengths=lengths, last_only=True)
        self._go_on(after)

    def _go_on(self, after: Any) -> None:
        if not self.is_fixed:
            self.state = after
            return
        for old, new in zip(tree_leaves(self.state), tree_leaves(after), strict=True):
            old.copy_(new)


class _Draft:
    """The assistant: decodes in place, and keeps what its tokens overwrite.

    On a GPU a token is one launch, what is kept included. What a state has in the host's memory is
    no part of it.
    """

    def __init__(
        self, model: LM, prompts: Sequence[Sequence[int]], prefill_tokens: int | None,
        newest: Tensor, num_drafted: int, room: int, sampler: Sampler, noise: _Noise,
        rules: LogitRules,
    ) -> None:  # fmt: skip
        B, self.num_read = len(newest), num_drafted + 1
        self.model, self.sampler, self.noise, self.rules = model, sampler, noise, rules
        _, state = read_prompts(model, prompts, prefill_tokens)
        self.state = model.reserve(state, room)
        self.graphs = Graphs(newest.device)
        self.drawn = noise.at([0] * B)  # buffers, as all that follows: graphs read them
        self.tokens, self.rows = newest.clone(), torch.arange(B, device=newest.device)
        self.count, self.taken = newest.new_zeros(1), torch.zeros_like(newest)
        self.found = newest.new_zeros(self.num_read, B)
        # What the state was after 0 to m + 1 of the tokens that are read for a proposal.
        self.past, self.past_on_host = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for x, on in zip(tree_leaves(self.state), model.stack.overwritten(), strict=True):
            past = self.past if x.device == newest.device else self.past_on_host
            past += [(x, x.new_empty(num_drafted + 2, *x.shape))] if on else []

    def propose(self, newest: Tensor, places: Sequence[int]) -> Tensor:
        """Return what may come after the newest tokens (B,), m tokens (B, m); all are read.

        `places` are those of the first of them, of each row.
        """
        self.tokens.copy_(newest)
        self.graphs.run(_Draft._begin, self)
        self._keep_on_host(0)
        for i in range(self.num_read):
            drawn = self.noise.at([place + i for place in places])
            if self.drawn is not None and drawn is not None:
                self.drawn.copy_(drawn)
            self.model.before_step(self.state, self.graphs.run)
            self.graphs.run(_Draft._advance, self)
            self._keep_on_host(i + 1)
        return self.found[:-1].T.clamp(min=0)

    def take(self, taken: Sequence[int]) -> None:
        """Go back to where so many of the m + 1 tokens were read, of each row."""
        count = torch.tensor(taken)
        self.taken.copy_(count)
        self.graphs.run(_Draft._go_back, self)
        for x, past in self.past_on_host:
            x.copy_(past[count, torch.arange(len(x))])

    def _begin(self) -> None:
        self.count.zero_()
        self._keep()

    def _advance(self) -> None:
        # A NO_TOKEN on a GPU is noticed only later; until then any valid token will do.
        logits = self.model.step(self.tokens.clamp(min=0)[:, None], self.state)[:, -1]
        self.tokens.copy_(self.sampler(self.rules(logits), self.drawn))
        self.found.index_copy_(0, self.count, self.tokens[None])
        self.count += 1
        self._keep()

    def _keep(self) -> None:
        for x, past in self.past:
            past.index_copy_(0, self.count, x[None])

    def _keep_on_host(self, count: int) -> None:
        for x, past in self.past_on_host:
            past[count].copy_(x)

    def _go_back(self) -> None:
        for x, past in self.past:
            x.copy_(past[self.taken, self.rows])
