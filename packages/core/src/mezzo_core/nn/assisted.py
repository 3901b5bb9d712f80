"""Assisted decoding: a small model proposes tokens, and one forward of the large one checks them.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (2023), for the
likeliest tokens. Both models take back what was proposed in vain (`Rewinding.rollback`), so that
recurrent models can do it too.
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
from mezzo_core.nn.sampler import LogitRules, Sampler


@torch.inference_mode()
def assisted_tokens(
    model: LM,
    assistant: LM,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    num_drafted: int,
    rules: LogitRules,
    prefill_tokens: int | None = None,
) -> Iterator[Tensor]:
    """Yield the next token of every row, (B,): the likeliest one by the model.

    Args:
        model: in evaluation mode, as the assistant.
        assistant: a model of the same vocabulary.
        prompts: tokens of each row.
        max_new_tokens: how many steps are yielded.
        num_drafted: m, the tokens that the assistant proposes before the model checks them.
        rules: change the logits of both models; without a penalty.
        prefill_tokens: how many tokens of the prompts run at a time; None for all.
    """
    m = num_drafted
    target = model.rewinding(m + 1)
    logits, state = read_prompts(model, prompts, prefill_tokens)
    newest = Sampler()(rules(logits))
    rows = [[token] for token in newest.tolist()]
    draft = _Draft(assistant, prompts, prefill_tokens, m, max_new_tokens, rules)
    for step in range(max_new_tokens):
        while any(len(row) <= step for row in rows):
            proposed = draft.propose(newest)
            logits, kept = target(torch.cat([newest[:, None], proposed], 1), state)
            best = Sampler()(rules(logits).flatten(0, 1)).view(-1, m + 1)
            vain = []
            for row, likely, guess in zip(rows, best.tolist(), proposed.tolist(), strict=True):
                right = 0
                while right < m and likely[right] == guess[right]:
                    right += 1
                is_done = len(row) >= max_new_tokens  # it goes no further: there is no room
                vain.append(m + 1 if is_done else m - right)
                row.extend([] if is_done else likely[: right + 1])
            state = target.rollback(kept, torch.tensor(vain)).state
            draft.take_back(torch.tensor(vain))
            newest = torch.tensor([row[-1] for row in rows], device=newest.device).clamp(min=0)
        yield torch.tensor([row[step] for row in rows])


class _Draft:
    """The assistant: decodes in place, and takes back."""

    def __init__(
        self, model: LM, prompts: Sequence[Sequence[int]], prefill_tokens: int | None,
        num_drafted: int, max_new_tokens: int, rules: LogitRules,
    ) -> None:  # fmt: skip
        self.model, self.rules = model.rewinding(num_drafted + 1), rules
        self.num_drafted, self.room = num_drafted, max_new_tokens + num_drafted + 1
        _, state = read_prompts(model, prompts, prefill_tokens)
        self.state = self._rewinding.begin(state)
        self.decoder: Decoder | None = None

    @property
    def _rewinding(self) -> Rewinding:
        return cast(Rewinding, self.model.stack)

    def propose(self, newest: Tensor) -> Tensor:
        """Return what may come after the newest tokens (B,), m tokens (B, m); all are read."""
        if self.decoder is None:
            state = self.model.reserve(self.state, self.room)
            self.decoder = Decoder(self.model, state, newest, Sampler(), rules=self.rules)
        self.decoder.tokens.copy_(newest)
        tokens = [self.decoder.step().clone() for _ in range(self.num_drafted + 1)]
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
