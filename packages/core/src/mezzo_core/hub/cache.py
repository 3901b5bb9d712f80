"""States in the place of transformers' caches."""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin

from mezzo_core.nn.lm import LM
from mezzo_core.nn.state import Rows

_LEAST_ROOM = 64
"""Tokens for which the first step of a decoding makes room; later the room doubles."""


class Decodes(Protocol):
    """What an `LM` and a mixer have in common: they decode in a state."""

    def init_state(self, batch: int) -> Any: ...  # noqa: D102
    def reserve(self, state: Any, num_tokens: int) -> Any: ...  # noqa: D102
    def before_step(self, state: Any) -> None: ...  # noqa: D102
    def step(self, x: Tensor, state: Any, /) -> Tensor: ...  # noqa: D102
    def select(self, state: Any, rows: Rows) -> Any: ...  # noqa: D102
    def fork(self, state: Any) -> Any: ...  # noqa: D102


class HeldState:
    """A module's state of a batch of rows, and the room that it has for steps in place."""

    def __init__(self, module: Decodes, state: Any) -> None:
        """Take a state before the first token."""
        self.module = module
        self.state = state
        self.num_tokens = 0
        """How many the longest row has seen, padding included."""
        self._room = 0

    def replace(self, state: Any, num_tokens: int) -> None:
        """Take the state after a forward over `num_tokens` more tokens, padding included."""
        self.state = state
        self.num_tokens += num_tokens
        self._room = 0

    def step(self, x: Tensor) -> Tensor:
        """Decode one token of every row in place."""
        # Outside of inference mode, tensors that were made in it cannot be overwritten.
        is_frozen = not torch.is_inference_mode_enabled() and any(
            part.is_inference() for part in tree_leaves(self.state)
        )
        if self._room == 0 or is_frozen:
            self._room = max(_LEAST_ROOM, self.num_tokens)
            self.state = self.module.reserve(self.state, self._room)
        self.module.before_step(self.state)
        y = self.module.step(x, self.state)
        self.num_tokens += 1
        self._room -= 1
        return y

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may come several times, or not at all."""
        self.state = self.module.select(self.state, rows.long())

    def repeat(self, repeats: int) -> None:
        """Repeat every row."""
        self.select(torch.arange(len(tree_leaves(self.state)[0])).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldState":
        """Return a second state after the same tokens, of the same module."""
        copy = HeldState(self.module, self.module.fork(self.state))
        copy.num_tokens, copy._room = self.num_tokens, self._room
        return copy


class MezzoCache(Cache):
    """The state of a batch of sequences, which `MezzoForCausalLM` reads and replaces.

    It has no layers of keys and values: what it holds is whatever the model's stack carries.
    """

    is_compileable = False
    is_croppable = False
    is_linear = (False,)

    def __init__(self, lm: LM, batch: int) -> None:
        """Begin `batch` sequences of a model."""
        super().__init__(layers=[])
        self.held = HeldState(lm, lm.init_state(batch))

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens the longest row has seen, padding included."""
        return self.held.num_tokens

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order; a row may come several times, or not at all."""
        self.held.select(indices)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows of the beams that go on."""
        self.held.select(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.held.repeat(repeats)

    def crop(self, *_: int) -> None:
        """Raise an error: a recurrent state does not forget its last tokens."""
        raise NotImplementedError("MezzoCache cannot be cropped: its states are recurrent")


class MixerLayer(CacheLayerMixin):
    """A mixer's state as one layer of a cache, beside layers of keys and values."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, held: HeldState) -> None:
        """Take the state."""
        super().__init__()
        self.held = held
        self.is_initialized = True

    def get_seq_length(self) -> int:
        """Return how many tokens the longest row has seen, padding included."""
        return self.held.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask has for other layers, and the first one's place."""
        return self.held.num_tokens + int(query_length), 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Keep the rows of the beams that go on."""
        self.held.select(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these rows, in this order."""
        self.held.select(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row."""
        self.held.repeat(repeats)

    def lazy_initialization(self, *_: Tensor) -> None:
        """Raise an error: a mixer keeps no keys and values."""
        raise NotImplementedError("MixerLayer holds a mixer's state, no keys and values")

    update = crop = lazy_initialization
