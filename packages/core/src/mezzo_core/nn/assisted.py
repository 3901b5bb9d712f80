"""Assisted decoding: a small model proposes tokens, and one forward of the large one checks them.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023). Rejected
tokens leave no trace in a state, so this also works for recurrent models: the large model looks
ahead of its state, and the small one keeps copies of what its tokens overwrite.

When sampling, both models use the same random numbers for a token: those that the large model would
use alone. Where the models agree, the proposed token is accepted; elsewhere the large model's token
is taken. So the tokens equal those of sampling without an assistant, not only in distribution.

A rejected token costs a step of the small model; but if all are accepted, more proposals would have
saved a forward of the large one. So the small model proposes 1.5 times the average number of
tokens accepted in the last rounds: more and more while all are right, two while none is.
"""

from collections.abc import Iterator, Sequence
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.decoder import without_rollback
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.kept_graphs import lent
from mezzo_core.nn.lm import LM
from mezzo_core.nn.prompts import read_prompts
from mezzo_core.nn.sampler import Generators, LogitRules, Sampler, draw_
from mezzo_core.nn.state import grows


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
    """Yield the next token of every row, (B,), as the model alone would sample it.

    In each round the assistant proposes, the model checks, and both states move on by the accepted
    tokens. The host reads only the result, so it waits for the GPU once a round.

    Args:
        model: in evaluation mode, as the assistant.
        assistant: a model of the same vocabulary.
        prompts: tokens of each row.
        max_new_tokens: how many steps are yielded.
        num_drafted: m, the most tokens that the assistant proposes before the model checks them.
        sampler: samples the tokens.
        generator: on the models' device.
        rules: change the logits of both models; without a penalty.
        prefill_tokens: how many tokens of the prompts run at a time; None for all.
    """
    m = num_drafted
    plain, assistant = without_rollback(model), without_rollback(assistant)
    logits, state = read_prompts(plain, prompts, prefill_tokens)
    noise = _Noise(sampler, generator, logits, _LEAD + 2 * (m + 1))
    noise.draw(1)
    newest = sampler(rules(logits), noise.at(noise.places))
    noise.places += 1
    target = _Target(plain, state, newest, m, sampler, noise, rules)
    del state  # the prompt's own copy
    room = max_new_tokens + 2 * m  # a row that is done may have m more, and m + 1 more are read
    draft = _Draft(assistant, prompts, prefill_tokens, newest, m, room, sampler, noise, rules)
    with lent(model, _Pair(target, draft, noise, max_new_tokens)) as pair:
        yield from pair.tokens(newest, m, max_new_tokens)


_LEAD = 32
"""The most tokens that a row can be ahead of the slowest one; random numbers are kept as long."""


class _Pair:
    """Both models, and what they do in a round.

    If the model's state has a fixed size, all work after a proposal is one CUDA graph on a GPU.
    """

    def __init__(
        self, target: "_Target", draft: "_Draft", noise: "_Noise", max_new_tokens: int
    ) -> None:
        self.target, self.draft, self.noise = target, draft, noise
        device = noise.places.device
        self.graphs = Graphs(device if target.in_graphs else torch.device("cpu"))
        self.end = noise.places.new_tensor(max_new_tokens)  # graphs read it

    def tokens(self, newest: Tensor, m: int, max_new_tokens: int) -> Iterator[Tensor]:
        """Yield the newest token of every row (B,), and the next ones, round after round."""
        target, draft, noise = self.target, self.draft, self.noise
        rows = [[token] for token in newest.tolist()]
        usual = float(m)  # how many tokens a row takes in a round; the last rounds count most
        for step in range(max_new_tokens):
            while any(len(row) <= step for row in rows):
                noise.draw(max(map(len, rows)) + m + 1)
                num_proposed = min(m, ceil(1.5 * usual))
                draft.propose(num_proposed)
                target.expect(num_proposed)
                each = self.graphs.run(_Pair._check, self).tolist()  # the one wait for a GPU
                for row, (*new, count) in zip(rows, each, strict=True):
                    row.extend(new[:count])
                counts = [count for *_, count in each]
                target.note(counts)
                draft.note(counts)
                moved = [count for count in counts if count]
                usual += (sum(moved) / len(moved) - usual) / 4
            yield torch.tensor([row[step] for row in rows])

    def _check(self) -> Tensor:
        """Check the proposal, and move both states on by the accepted tokens.

        Returns:
            (B, m + 2): the model's own m + 1 tokens of each row, and how many of them are taken.
        """
        target, draft = self.target, self.draft
        proposed, num_proposed = draft.proposed, draft.count - 1
        best = target.check(proposed, num_proposed)
        taken = self._taken(best, proposed, num_proposed)
        self.noise.places += taken
        target.take(best, taken)
        draft.take(taken, target.newest)
        return torch.cat([best, taken[:, None]], 1)

    def _taken(self, best: Tensor, proposed: Tensor, num_proposed: Tensor) -> Tensor:
        """Return how many of the model's tokens `best` (B, m + 1) each row takes.

        These are the proposed ones up to the first wrong one, and one more. A row that is done, or
        too far ahead of the others, takes none.
        """
        is_right = (best[:, :-1] == proposed) & (self.target.offsets[:-1] < num_proposed)
        right = is_right.long().cumprod(1).sum(1)
        places = self.noise.places
        stays = (places >= self.end) | (places > places.min() + _LEAD)
        return (right + 1).masked_fill(stays, 0)


class _Noise:
    """Random numbers of all rows for each place, in the order of sampling without an assistant.

    Place p is that of a row's p-th new token. The newest numbers are in a ring, which graphs read.
    """

    def __init__(
        self, sampler: Sampler, generator: Generators, logits: Tensor, num_places: int
    ) -> None:
        """Take logits (B, vocab) for their shape; greedy sampling needs no numbers."""
        self.generator, self.num_drawn = generator, 0
        self.rows = torch.arange(len(logits), device=logits.device)
        self.places = torch.zeros_like(self.rows)  # of each row's next token
        self.ring: Tensor | None = None
        if sampler.temperature > 0:
            self.ring = logits.new_empty(num_places, *logits.shape, dtype=torch.float32)

    def draw(self, end: int) -> None:
        """Draw the numbers of all places before `end`."""
        while self.ring is not None and self.num_drawn < end:
            draw_(self.ring[self.num_drawn % len(self.ring)], self.generator)
            self.num_drawn += 1

    def at(self, places: Tensor) -> Tensor | None:
        """Return the numbers of places (B,) or (B, n), row after row: (N, vocab)."""
        if self.ring is None:
            return None
        rows = self.rows.view(-1, *[1] * (places.ndim - 1))
        return self.ring[places % len(self.ring), rows].view(-1, self.ring.shape[2])


class _Target:
    """The model, which checks proposals.

    Its state lacks the *pending* tokens of a row: the newest before the last round, and those taken
    in it. A check reads the pending tokens and the proposal behind them, and moves the state up to
    the newest token, without it. The next check reads that token again, so a row that takes nothing
    can wait.
    """

    def __init__(
        self, model: LM, state: Any, newest: Tensor, num_drafted: int, sampler: Sampler,
        noise: _Noise, rules: LogitRules,
    ) -> None:  # fmt: skip
        self.model, self.sampler, self.noise, self.rules = model, sampler, noise, rules
        self.is_fixed = not grows(model.init_state(1))
        self.state = model.reserve(state, 0) if self.is_fixed else state
        self.in_graphs = self.is_fixed and newest.is_cuda
        # The first `counts` tokens of each row are pending, the newest last; then the proposal.
        self.tokens = newest.new_zeros(len(newest), 2 * num_drafted + 2)
        self.tokens[:, 0] = newest.clamp(min=0)
        self.counts, self.lengths = torch.ones_like(newest), torch.zeros_like(newest)
        self.most = 1  # the largest count, on the host
        self.num_read = self.tokens.shape[1]
        self.offsets = torch.arange(num_drafted + 1, device=newest.device)

    @property
    def newest(self) -> Tensor:
        """The newest token of each row (B,)."""
        return self.tokens.gather(1, self.counts[:, None] - 1)[:, 0]

    def expect(self, num_proposed: int) -> None:
        """Set how many tokens the next check reads; a graph always reads all.

        A state that grows keeps room for every token read, so reading more would waste memory.
        """
        if not self.in_graphs:
            self.num_read = self.most + num_proposed

    def check(self, proposed: Tensor, num_proposed: Tensor) -> Tensor:
        """Return the model's token after the newest one and after each proposed one: (B, m + 1).

        Args:
            proposed: (B, m).
            num_proposed: (1,), how many of them are valid; results after others are meaningless.
        """
        lm = self.model
        self.tokens.scatter_(1, self.counts[:, None] + self.offsets[:-1], proposed)
        self.lengths.copy_(self.counts + num_proposed)
        x, after = lm.stack.look_ahead(
            lm.embed(self.tokens[:, : self.num_read]), self.state, self.lengths, self.counts - 1
        )
        if self.is_fixed:
            torch._foreach_copy_(tree_leaves(self.state), tree_leaves(after))
        else:
            self.state = after
        index = (self.counts[:, None] - 1 + self.offsets).clamp(max=self.num_read - 1)[..., None]
        x = x.gather(1, index.expand(-1, -1, x.shape[2]))
        logits = self.rules(lm.head(lm.norm(x)))
        drawn = self.noise.at(self.noise.places[:, None] + self.offsets)
        return self.sampler(logits.flatten(0, 1), drawn).view(index.shape[:2])

    def take(self, best: Tensor, taken: Tensor) -> None:
        """Make the first `taken` (B,) tokens of each row's check pending."""
        self.tokens[:, 0] = self.newest
        self.tokens[:, 1 : 1 + len(self.offsets)] = best.clamp(min=0)
        self.counts.copy_(taken + 1)

    def note(self, taken: Sequence[int]) -> None:
        """Tell the host how many tokens were taken."""
        self.most = 1 + max(taken)


class _Draft:
    """The assistant: decodes in place, and keeps copies of what its tokens overwrite.

    On a GPU each token is one launch, copies included, except for copies in the host's memory.
    """

    def __init__(
        self, model: LM, prompts: Sequence[Sequence[int]], prefill_tokens: int | None,
        newest: Tensor, num_drafted: int, room: int, sampler: Sampler, noise: _Noise,
        rules: LogitRules,
    ) -> None:  # fmt: skip
        B = len(newest)
        self.model, self.sampler, self.noise, self.rules = model, sampler, noise, rules
        _, state = read_prompts(model, prompts, prefill_tokens)
        self.state = model.reserve(state, room)
        waits = model.stack.step_waits()
        self.graphs = Graphs(torch.device("cpu") if waits else newest.device)
        # Graphs read all the buffers below.
        self.tokens = newest.clone()
        self.count = newest.new_zeros(1)  # how many tokens were read since the last check
        self.found = newest.new_zeros(num_drafted + 1, B)
        # The overwritten tensors of the state after 0 to m + 1 tokens of a proposal.
        self.past, self.past_on_host = list[tuple[Tensor, Tensor]](), list[tuple[Tensor, Tensor]]()
        for x, on in zip(tree_leaves(self.state), model.stack.overwritten(), strict=True):
            past = self.past if x.device == newest.device else self.past_on_host
            past += [(x, x.new_empty(num_drafted + 2, *x.shape))] if on else []
        self._keep()

    def propose(self, count: int) -> None:
        """Propose `count` tokens after the newest ones, and read all of them."""
        for i in range(count + 1):
            self._keep_on_host(i)
            self.model.before_step(self.state, self.graphs.run)
            self.graphs.run(_Draft._advance, self)
        self._keep_on_host(count + 1)

    @property
    def proposed(self) -> Tensor:
        """The tokens of the last proposal (B, m); if it is shorter, older ones follow."""
        return self.found[:-1].T.clamp(min=0)

    def take(self, taken: Tensor, newest: Tensor) -> None:
        """Restore the state after `taken` (B,) of the tokens; read `newest` (B,) next."""
        for x, past in self.past:
            x.copy_(past[taken, self.noise.rows])
        self.tokens.copy_(newest)
        self.count.zero_()
        self._keep()

    def note(self, taken: Sequence[int]) -> None:
        """Restore the part of the state that is in the host's memory."""
        for x, past in self.past_on_host:
            x.copy_(past[torch.tensor(taken), torch.arange(len(x))])

    def _advance(self) -> None:
        # The host notices a NO_TOKEN only later; until then any valid token will do.
        logits = self.model.step(self.tokens.clamp(min=0)[:, None], self.state)[:, -1]
        drawn = self.noise.at(self.noise.places + self.count)
        self.tokens.copy_(self.sampler(self.rules(logits), drawn))
        self.found.index_copy_(0, self.count, self.tokens[None])
        self.count += 1
        self._keep()

    def _keep(self) -> None:
        for x, past in self.past:
            past.index_copy_(0, self.count, x[None])

    def _keep_on_host(self, count: int) -> None:
        for x, past in self.past_on_host:
            past[count].copy_(x)
