"""Assisted decoding: a small model proposes tokens, and one forward of the large one checks them.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023). Both models
take back what was proposed in vain (`Rewinding.rollback`), so that recurrent models can do it too.

Where tokens are sampled, both models sample each of them by the same random numbers, those that the
large one would take alone: where they agree the token is right, and where not it is that of the
large one. So the tokens are those of sampling without an assistant, not only their distribution.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from mezzo_core.nn.decoder import Decoder
from mezzo_core.nn.lm import LM
from mezzo_core.nn.prompts import read_prompts
from mezzo_core.nn.rewinding import Rewinding
from mezzo_core.nn.sampler import Generators, LogitRules, Sampler, draw_


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
    target = model.rewinding(m + 1)
    logits, state = read_prompts(model, prompts, prefill_tokens)
    noise = _Noise(sampler, generator, logits)
    newest = sampler(rules(logits), noise.at([0] * len(prompts)))
    rows = [[token] for token in newest.tolist()]
    draft = _Draft(assistant, prompts, prefill_tokens, m, max_new_tokens, sampler, noise, rules)
    for step in range(max_new_tokens):
        while any(len(row) <= step for row in rows):
            places = [len(row) for row in rows]
            proposed = draft.propose(newest, places)
            logits, kept = target(torch.cat([newest[:, None], proposed], 1), state)
            drawn = noise.at([place + i for place in places for i in range(m + 1)])
            best = sampler(rules(logits).flatten(0, 1), drawn).view(-1, m + 1)
            vain = []
            for row, likely, guess in zip(rows, best.tolist(), proposed.tolist(), strict=True):
                right = 0
                while right < m and likely[right] == guess[right]:
                    right += 1
                # One that is done goes no further: there is no room. One that is far ahead waits.
                stays = len(row) >= max_new_tokens or len(row) > step + _LEAD
                vain.append(m + 1 if stays else m - right)
                row.extend([] if stays else likely[: right + 1])
            state = target.rollback(kept, torch.tensor(vain)).state
            draft.take_back(torch.tensor(vain))
            newest = torch.tensor([row[-1] for row in rows], device=newest.device).clamp(min=0)
        noise.forget(step)
        yield torch.tensor([row[step] for row in rows])


_LEAD = 32
"""How many tokens a row can be ahead of the slowest one: so long its random numbers are kept."""


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


class _Draft:
    """The assistant: decodes in place, and takes back."""

    def __init__(
        self, model: LM, prompts: Sequence[Sequence[int]], prefill_tokens: int | None,
        num_drafted: int, max_new_tokens: int, sampler: Sampler, noise: "_Noise",
        rules: LogitRules,
    ) -> None:  # fmt: skip
        self.sampler, self.noise = sampler, noise
        self.drawn = noise.at([0] * len(prompts))  # a buffer: a graph reads it
        self.model, self.rules = model.rewinding(num_drafted + 1), rules
        self.num_drafted, self.room = num_drafted, max_new_tokens + num_drafted + 1
        _, state = read_prompts(model, prompts, prefill_tokens)
        self.state = self._rewinding.begin(state)
        self.decoder: Decoder | None = None

    @property
    def _rewinding(self) -> Rewinding:
        return cast(Rewinding, self.model.stack)

    def propose(self, newest: Tensor, places: Sequence[int]) -> Tensor:
        """Return what may come after the newest tokens (B,), m tokens (B, m); all are read.

        `places` are those of the first of them, of each row.
        """
        if self.decoder is None:
            state = self.model.reserve(self.state, self.room)
            self.decoder = Decoder(self.model, state, newest, self.sampler, self.drawn, self.rules)
        self.decoder.tokens.copy_(newest)
        tokens = []
        for i in range(self.num_drafted + 1):
            drawn = self.noise.at([place + i for place in places])
            if self.drawn is not None and drawn is not None:
                self.drawn.copy_(drawn)
            tokens.append(self.decoder.step().clone())
        return torch.stack(tokens[:-1], 1).clamp(min=0)

    def take_back(self, vain: Tensor) -> None:
        """Take back so many tokens (B,) of the m + 1 that were read."""
        assert self.decoder is not None
        rolled = self.model.rollback(self.decoder.state, vain)
        self.state = self._rewinding.begin(rolled.state)
        if not _overwrite(self.decoder.state, self.state):
            self.decoder = None  # a window has grown: it needs other buffers


def _overwrite(state: Any, new: Any) -> bool:
    """Copy a state into the buffers of another, for a graph; False if their shapes differ."""
    pairs = list(zip(tree_leaves(state), tree_leaves(new), strict=True))
    if any(old.shape != x.shape for old, x in pairs):
        return False
    for old, x in pairs:
        if old is not x:
            old.copy_(x)
    return True
