"""States that take the place of transformers' caches."""

from copy import copy, deepcopy
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.generation import GenerationMode

from mezzo_core.errors import UserError
from mezzo_core.hub.padding import Padding
from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.nn.lm import LM
from mezzo_core.nn.rewinding import Kept, Rewinding
from mezzo_core.nn.sharded import lacks_weights

_LEAST_ROOM = 64
"""Tokens for which the first step of a decoding makes room; later the room doubles."""

_ZERO_KEEPS_NOTHING = "max_length" in signature(Cache.crop).parameters


class HeldState:
    """A module's state of a batch of rows, and the room that it has: for steps, and to go back."""

    def __init__(self, module: LM | AbstractSequenceModule, batch: int, length: int = 0) -> None:
        """Begin `batch` sequences, for which the first step makes room for `length` tokens.

        Raises:
            UserError: if the module's weights are on several devices or in several processes, or
                elsewhere until needed.
        """
        places = {str(weight.device) for weight in module.parameters()}
        if lacks_weights(module):
            places.add("those of other processes (FSDP2)")
        if len(places) > 1 or "meta" in places:
            raise UserError(
                "a cache needs all weights on one device, and they are on "
                f"{' and '.join(sorted(places))}: load the model without device_map, offload or "
                "FSDP, or give use_cache=False"
            )
        self.module = module
        self.state = module.init_state(batch)
        self.length = length
        self.num_tokens = 0
        """How many the longest row has seen, padding included."""
        self.rollback = 0
        """How many of the last tokens `crop` can take back."""
        self._running: Any = module
        self._room = 0
        self._real: Tensor | None = None

    def allow_rollback(self, num_tokens: int) -> None:
        """Let `crop` take back at least so many of the tokens that come after this call."""
        if num_tokens <= self.rollback:
            return
        state, module = self._plain_state(), self.module
        if isinstance(module, LM):
            self._running = module.rewinding(num_tokens)
        else:
            self._running = Rewinding(module, num_tokens)
        self._replace(self._begun(state), 0)
        self.rollback, self._real = num_tokens, None

    def read(self, x: Tensor, padding: Padding | None = None, *, last_only: bool = False) -> Tensor:
        """Read more tokens (B, T, ...), each row's padding at its end.

        Args:
            x: what the module takes.
            padding: where it was in the rows, if there is any.
            last_only: of an `LM`, give the logits of each row's last real token alone.

        Returns:
            What the module computes.
        """
        T, wanted = x.shape[1], {"last_only": True} if last_only else {}
        self._remember(x, padding)
        first = T - self.rollback
        if not self.rollback or first < 0 or padding is not None:
            lengths = None if padding is None else padding.lengths
            y, state = self._running(x, self.state, lengths=lengths, **wanted)
            self._replace(state, T)
            return y
        # Only the last tokens can be taken back. The module itself reads those before them.
        parts, state = [], self._plain_state()
        if first > 0:
            y, state = self.module(x[:, :first], state, **wanted)
            parts.append(y)
        y, state = self._running(x[:, first:], self._begun(state), **wanted)
        self._replace(state, T)
        return y if last_only else torch.cat([*parts, y], 1)

    def read_on(
        self, x: Tensor, padding: Padding | None = None, *, last_only: bool = False
    ) -> Tensor:
        """Read more tokens; a single one of each row by a step, if nothing needs a gradient."""
        is_step = x.shape[1] == 1 and padding is None and self.num_tokens > 0
        if is_step and not torch.is_grad_enabled():
            return self.step(x)
        return self.read(x, padding, last_only=last_only)

    def step(self, x: Tensor) -> Tensor:
        """Decode one token of every row in place."""
        # Outside of inference mode, tensors that were made in it cannot be overwritten.
        is_frozen = not torch.is_inference_mode_enabled() and any(
            part.is_inference() for part in tree_leaves(self.state)
        )
        if self._room == 0 or is_frozen:
            more = self.length - self.num_tokens
            self._room = more if more > 0 else max(_LEAST_ROOM, self.num_tokens)
            self.state = self._running.reserve(self.state, self._room)
        self._running.before_step(self.state)
        y = self._running.step(x, self.state)
        self._remember(x, None)
        self.num_tokens += 1
        self._room -= 1
        return y

    def crop(self, num_tokens: int) -> None:
        """Take back the last tokens of every row, and padding between them, in the same buffers.

        Args:
            num_tokens: -n to take back n, or how many tokens of the longest row to keep, padding
                included. 0 takes nothing back; with older versions of transformers it keeps none.

        Raises:
            UserError: if there is no room to go back so far.
            ValueError: if a row has fewer tokens that can be taken back.
        """
        keeps = num_tokens > 0 or (num_tokens == 0 and _ZERO_KEEPS_NOTHING)
        n = max(self.num_tokens - num_tokens, 0) if keeps else -num_tokens
        if n > self.rollback:
            raise UserError(
                f"crop can take back {self.rollback} tokens, got {n}: "
                f"allow_rollback({n}), called before they come, keeps room for more"
            )
        if n > 0:
            amount: int | Tensor = n
            if self._real is not None:
                before = max(n - self._real.shape[1], 0)  # not remembered: without padding
                amount, self._real = self._real[:, -n:].sum(1) + before, self._real[:, :-n]
            self.state = self._running.rollback(self.state, amount)
            self.num_tokens -= n
            self._room += n if self._room else 0

    def select(self, rows: Tensor) -> None:
        """Keep these rows, in this order; a row may come several times, or not at all."""
        self.state = self._running.select(self.state, rows.long())
        self._real = None if self._real is None else self._real[rows.to(self._real.device)]

    def repeat(self, repeats: int) -> None:
        """Repeat every row."""
        self.select(torch.arange(len(tree_leaves(self.state)[0])).repeat_interleave(repeats))

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeldState":
        """Return a second state after the same tokens, of the same module."""
        second = copy(self)
        second.state = self._running.fork(self.state)
        return second

    def _replace(self, state: Any, num_tokens: int) -> None:
        """Take the state after a forward over `num_tokens` more tokens, padding included."""
        self.state = state
        self.num_tokens += num_tokens
        self._room = 0

    def _remember(self, x: Tensor, padding: Padding | None) -> None:
        """Remember where padding is among the last columns, which `crop` may take back."""
        if not self.rollback or (padding is None and self._real is None):
            return
        ones = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
        new = ones if padding is None else padding.real
        old = new[:, :0] if self._real is None else self._real
        self._real = torch.cat([old, new], 1)[:, -2 * self.rollback :]

    def _plain_state(self) -> Any:
        """Return the module's state, without what is kept to go back."""
        return self.state.state if isinstance(self.state, Kept) else self.state

    def _begun(self, state: Any) -> Kept:
        """Return a state that can go back to this one, and no further."""
        rewinding = self._running.stack if isinstance(self.module, LM) else self._running
        begun: Kept = rewinding.begin(state)
        return begun


class _HoldsState:
    """What a whole cache and one layer of a cache do alike: they ask the state that they hold."""

    held: HeldState

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can take tokens back."""
        return self.held.rollback > 0

    def crop(self, num_tokens: int) -> None:
        """Take back the last tokens of every row; see `HeldState.crop`."""
        self.held.crop(num_tokens)

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


class MezzoCache(_HoldsState, Cache):
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
        self.held = HeldState(lm, batch, length)
        self.held.allow_rollback(rollback)

    def allow_rollback(self, num_tokens: int) -> None:
        """Let `crop` take back at least so many of the tokens that come after this call."""
        self.held.allow_rollback(num_tokens)

    def __deepcopy__(self, memo: dict[int, Any]) -> "MezzoCache":
        """Return a second cache after the same tokens, of the same model."""
        second = copy(self)
        second.held = deepcopy(self.held, memo)
        return second


class MixerLayer(_HoldsState, CacheLayerMixin):
    """A mixer's state as one layer of a cache, beside layers of keys and values."""

    is_compileable = False
    is_sliding = False

    def __init__(self, held: HeldState) -> None:
        """Take the state."""
        super().__init__()
        self.held = held
        self.is_initialized = True

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys a mask has for other layers, and the first one's place."""
        return self.held.num_tokens + int(query_length), 0

    def get_max_length(self) -> int:
        """Return -1: there is no limit."""
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.20

    def lazy_initialization(self, *_: Tensor) -> None:
        """Raise an error: a mixer keeps no keys and values."""
        raise NotImplementedError("MixerLayer holds a mixer's state, no keys and values")

    update = lazy_initialization


def room_to_go_back(config: GenerationConfig, mode: GenerationMode) -> int:
    """Return how many tokens a call of `generate` may take back at once; 0 without an assistant.

    An assistant takes back up to all that it proposed, and the token before. The model itself makes
    more room at each call, as `logits_to_keep` says.
    """
    if config.is_assistant:
        return config.max_new_tokens + 1
    return int(mode == GenerationMode.ASSISTED_GENERATION)


def read_only_new(tokens: Tensor, cache: Any, options: dict[str, Any]) -> None:
    """Let `prepare_inputs_for_generation`, by its options, give only tokens that are not cached.

    With an assistant, transformers would read the tokens of a given cache again. As where there is
    none, a mask that is longer than the tokens tells that only new ones are given.
    """
    is_told = options.get("next_sequence_length", 0) is not None
    if is_told or not options.get("is_first_iteration") or not isinstance(cache, Cache):
        return
    mask, length = options.get("attention_mask"), tokens.shape[1]
    if (new := length - cache.get_seq_length()) > 0 and (mask is None or mask.shape[1] == length):
        options["next_sequence_length"] = new
