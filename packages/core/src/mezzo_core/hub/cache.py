"""States in the place of transformers' caches."""

from copy import copy, deepcopy
from inspect import signature
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers.cache_utils import Cache, CacheLayerMixin

from mezzo_core.errors import UserError
from mezzo_core.nn.lm import LM
from mezzo_core.nn.rewinding import Kept, Rewinding
from mezzo_core.nn.state import Rows

_LEAST_ROOM = 64
"""Tokens for which the first step of a decoding makes room; later the room doubles."""

_ZERO_KEEPS_NOTHING = "max_length" in signature(Cache.crop).parameters


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

    def __init__(self, module: Decodes, state: Any, length: int = 0) -> None:
        """Take a state before the first token, which the first step gives room for `length`."""
        self.module = module
        self.state = state
        self.length = length
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
            more = self.length - self.num_tokens
            self._room = more if more > 0 else max(_LEAST_ROOM, self.num_tokens)
            self.state = self.module.reserve(self.state, self._room)
        self.module.before_step(self.state)
        y = self.module.step(x, self.state)
        self.num_tokens += 1
        self._room -= 1
        return y

    def go_back(self, state: Any, n: int) -> None:
        """Take the state before the last n tokens, in the same buffers."""
        self.state = state
        self.num_tokens -= n
        self._room += n if self._room else 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may come several times, or not at all."""
        self.state = self.module.select(self.state, rows.long())

    def repeat(self, repeats: int) -> None:
        """Repeat every row."""
        self.select(torch.arange(len(tree_leaves(self.state)[0])).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldState":
        """Return a second state after the same tokens, of the same module."""
        copy = HeldState(self.module, self.module.fork(self.state), self.length)
        copy.num_tokens, copy._room = self.num_tokens, self._room
        return copy


class MezzoCache(Cache):
    """The state of a batch of sequences, which `MezzoForCausalLM` reads and replaces.

    It has no layers of keys and values: what it holds is whatever the model's stack carries.
    """

    is_compileable = False
    is_linear = (False,)

    def __init__(self, lm: LM, batch: int, rollback: int = 0, length: int = 0) -> None:
        """Begin `batch` sequences of a model.

        Args:
            lm: the model's `lm`.
            batch: how many sequences.
            rollback: how many of the last tokens `crop` can take back.
            length: tokens of a sequence for which the first step makes room at once, so that the
                buffers stay the same, as compiled steps want them; 0 lets the room grow.
        """
        super().__init__(layers=[])
        self.lm = lm
        self.held = HeldState(lm, lm.init_state(batch), length)
        self.rollback = 0
        self._module = lm
        self.allow_rollback(rollback)

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back."""
        return self.rollback > 0

    def allow_rollback(self, num_tokens: int) -> None:
        """Let `crop` take back at least so many of the tokens that come after this call."""
        if num_tokens <= self.rollback:
            return
        self._module = self.held.module = self.lm.rewinding(num_tokens)
        self.held.replace(self._begun(self._plain_state()), 0)
        self.rollback = num_tokens

    def read(
        self, tokens: Tensor, lengths: Tensor | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Read more tokens (B, T), each row's padding at its end; return logits as `LM` does."""
        held, T = self.held, tokens.shape[1]
        first = T - self.rollback
        if not self.rollback or first < 0 or lengths is not None:
            logits, state = self._module(tokens, held.state, lengths=lengths, last_only=last_only)
            held.replace(state, T)
            return logits
        # Nothing before the last tokens will be taken back: the model itself reads it, once.
        parts, state = [], self._plain_state()
        if first > 0:
            logits, state = self.lm(tokens[:, :first], state, last_only=last_only)
            parts.append(logits)
        last = tokens[:, first:]
        logits, state = self._module(last, self._begun(state), last_only=last_only)
        held.replace(state, T)
        return logits if last_only else torch.cat([*parts, logits], 1)

    def crop(self, num_tokens: int) -> None:
        """Take back the last tokens of every row, padding not counted.

        Args:
            num_tokens: -n to take back n, or how many tokens of the longest row to keep. 0 takes
                nothing back; with older versions of transformers it keeps nothing.

        Raises:
            UserError: if there is no room to go back so far.
            ValueError: if a row has fewer tokens that can be taken back.
        """
        seen = self.held.num_tokens
        keeps = num_tokens > 0 or (num_tokens == 0 and _ZERO_KEEPS_NOTHING)
        n = max(seen - num_tokens, 0) if keeps else -num_tokens
        if n > self.rollback:
            raise UserError(
                f"crop can take back {self.rollback} tokens, got {n}: "
                f"MezzoCache(lm, batch, rollback={n}) keeps room for more"
            )
        if n > 0:
            self.held.go_back(self._module.rollback(self.held.state, n), n)

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

    def __deepcopy__(self, memo: dict[int, Any]) -> "MezzoCache":
        """Return a second cache after the same tokens, of the same model."""
        second = copy(self)
        second.held = deepcopy(self.held, memo)
        return second

    def _plain_state(self) -> Any:
        """Return the model's state, without what is kept to go back."""
        state = self.held.state
        return state.state if isinstance(state, Kept) else state

    def _begun(self, state: Any) -> Kept:
        """Return a state that can go back to this one, and no further."""
        assert isinstance(self._module.stack, Rewinding)
        return self._module.stack.begin(state)


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
