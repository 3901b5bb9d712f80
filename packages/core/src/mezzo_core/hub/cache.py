"""A model's state in the place of transformers' cache."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache

from mezzo_core.nn.lm import LM

_LEAST_ROOM = 64
"""Tokens for which the first step of a decoding makes room; later the room doubles."""


class MezzoCache(Cache):
    """The state of a batch of sequences, which `MezzoForCausalLM` reads and replaces.

    It has no layers of keys and values: what it holds is whatever the model's stack carries.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, lm: LM, state: Any) -> None:
        """Take a model and its state before the first token, from its `init_state`."""
        super().__init__(layers=[])
        self._lm = lm
        self.state = state
        self._num_tokens = 0
        self._room = 0  # how many more tokens `step` may write in the state's buffers

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens the longest row has seen, padding included."""
        return self._num_tokens

    def replace(self, state: Any, num_tokens: int) -> None:
        """Take the state after a forward over `num_tokens` more tokens, padding included."""
        self.state = state
        self._num_tokens += num_tokens
        self._room = 0

    def step(self, tokens: Tensor) -> Tensor:
        """Decode one token of every row, (B, 1), in place; return its logits (B, 1, vocab)."""
        # Outside of inference mode, tensors that were made in it cannot be overwritten.
        is_frozen = not torch.is_inference_mode_enabled() and any(
            part.is_inference() for part in tree_leaves(self.state)
        )
        if self._room == 0 or is_frozen:
            self._room = max(_LEAST_ROOM, self._num_tokens)
            self.state = self._lm.reserve(self.state, self._room)
        self._lm.before_step(self.state)
        logits = self._lm.step(tokens, self.state)
        self._num_tokens += 1
        self._room -= 1
        return logits

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may come several times, or not at all."""
        self.state = self._lm.select(self.state, indices.long())

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows of the beams that go on."""
        self.batch_select_indices(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        rows = len(tree_leaves(self.state)[0])
        self.batch_select_indices(torch.arange(rows).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> "MezzoCache":
        """Return a second cache after the same tokens, of the same model."""
        copy = MezzoCache(self._lm, self._lm.fork(self.state))
        copy._num_tokens, copy._room = self._num_tokens, self._room
        return copy

    def crop(self, *_: int) -> None:
        """Raise an error: a recurrent state does not forget its last tokens."""
        raise NotImplementedError("MezzoCache cannot be cropped: its states are recurrent")
