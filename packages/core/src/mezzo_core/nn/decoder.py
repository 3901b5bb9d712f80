"""Decoding: one token of every row a step, in one CUDA graph on a GPU."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from mezzo_core.nn.contract import AbstractStack
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.lm import LM
from mezzo_core.nn.rewinding import Rewinding
from mezzo_core.nn.sampler import LogitRules, Noise, Sampler


class Decoder:
    """Samples one token of every row in each step, overwriting the state.

    The first step runs eagerly. On a GPU the second step is captured as a CUDA graph, and from then
    on a step is one launch (`Graphs`). Work of `before_step` becomes another graph in the same way.
    Steps that wait for the GPU (`step_waits`) stay eager.
    """

    def __init__(
        self,
        model: LM,
        state: Any,
        tokens: Tensor,
        sampler: Sampler,
        generator: Noise = None,
        rules: LogitRules | None = None,
    ) -> None:
        """Take over the state.

        Args:
            model: in evaluation mode.
            state: from `model.reserve`, with room for as many tokens as there will be steps.
            tokens: (B,) int64, the newest token of each row, which is not in the state yet.
            sampler: samples the next tokens.
            generator: on the model's device; or drawn numbers, in a buffer that the caller fills
                before each step.
            rules: change the logits, and see each new token.
        """
        self.model = model
        self.state = state
        self.tokens = tokens.clone()
        self.sampler = sampler
        self.generator = generator
        self.rules = rules
        device = torch.device("cpu") if model.stack.step_waits() else tokens.device
        self._graphs = Graphs(device, _generators(generator))

    @torch.inference_mode()
    def step(self) -> Tensor:
        """Return each row's next token, (B,) int64, in a buffer that the next step overwrites."""
        self.model.before_step(self.state, self._graphs.run)
        self._graphs.run(Decoder._advance, self)
        return self.tokens

    def _advance(self) -> None:
        # The host notices a NO_TOKEN only later; until then any valid token will do.
        logits = self.model.step(self.tokens.clamp(min=0)[:, None], self.state)[:, -1]
        if self.rules is not None:
            logits = self.rules(logits)
        self.tokens.copy_(self.sampler(logits, self.generator))
        if self.rules is not None:
            self.rules.note_(self.tokens)


def without_rollback(model: LM) -> LM:
    """Return the same model without rollback, which pure decoding does not need, if it has any.

    The forward of a `Rewinding` counts tokens on the host, so that no CUDA graph can hold it.
    """
    if not isinstance(model.stack, Rewinding):
        return model
    plain = cast(AbstractStack, model.stack.module)
    return LM(model.embed, plain, model.norm, model.head)


def _generators(noise: Noise) -> Sequence[torch.Generator]:
    if isinstance(noise, torch.Generator):
        return [noise]
    return noise if isinstance(noise, Sequence) else ()
