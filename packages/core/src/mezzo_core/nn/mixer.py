"""The contract of a sequence mixer: what a block, a model and a decoder may ask of one."""

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from mezzo_core.ops.checks import check_floating, check_lengths
from mezzo_core.ops.packed import check_borders, check_cu_seqlens


class AbstractMixer(nn.Module, ABC):
    """A module that mixes along time, (B, T, C) to (B, T, C), causally.

    A mixer holds no non-persistent buffers: models are loaded through the meta device.

    One law, tested for every mixer: a full forward equals any segmentation of the sequence equals
    one token at a time, to rounding. A state is a NamedTuple of tensors whose first axis is the
    batch. `forward` never overwrites the state that it is given; `step` does, and only it: it
    decodes into buffers from `reserve`. Both begin with the contract's checks, `check_input` and
    `check_step`.
    """

    d_model: int
    """Width C of what goes in and out."""
    state_type: ClassVar[type[Any]]
    """The NamedTuple that `init_state` returns."""

    _state_shapes: dict[str, tuple[torch.Size, bool]] | None = None

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Mix along time.

        Args:
            x: (B, T, C), already normalized.
            state: where these tokens continue from; None for training, when no state is kept.
            cu_seqlens: (S + 1,) int32 or int64, borders of S sequences packed in one row: starts
                at 0, ends at T, never decreases; B must be 1 and `state` None.
            lengths: (B,) int64, how many of the T tokens of each row are real (the rest is padding
                on the right: its outputs mean nothing and it leaves the state alone); 0 is legal;
                needs a state. Its values are checked on the CPU only.

        Returns:
            y (B, T, C), and the state after the last real token (None if `state` was None).
        """

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Decode one token of every row, overwriting the state in place.

        Nothing waits for the GPU and no shape depends on values, so a CUDA graph can hold the
        call. It runs without gradients. Steps beyond the reserved room raise on a CPU; on a GPU
        that would need a wait: nothing is written out of bounds, and the outputs mean nothing.

        This default serves states of fixed size; a state that grows needs `reserve` and `step` of
        its own.

        Args:
            x: (B, 1, C), already normalized.
            state: from `reserve`.

        Returns:
            y (B, 1, C).

        Raises:
            RuntimeError: if gradients are on: what is overwritten has none.
            ValueError: if an argument breaks the contract, `forward` returns a state of other
                shapes, or the room is used up.
        """
        self.check_step(x, state)
        y, after = self(x, state)
        for name, old, new in zip(state._fields, state, after, strict=True):
            if old.shape != new.shape:
                raise ValueError(
                    f"{type(self).__name__} must define reserve and step: its state's {name} "
                    f"grows, from {tuple(old.shape)} to {tuple(new.shape)}"
                )
            old.copy_(new)
        return y

    def reserve(self, state: Any, num_tokens: int) -> Any:
        """Return the state with room for `num_tokens` more tokens of every row.

        Its buffers are its own, which `step` may overwrite. Reading lengths may wait for the GPU.
        """
        return type(state)(*(field.clone() for field in state))

    def init_gates(self) -> None:
        """Start what is no weight of a Linear or a norm; `init_weights` calls it last."""

    @abstractmethod
    def init_state(self, batch: int) -> Any:
        """Return the state before the first token, on the device of the weights."""

    @abstractmethod
    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that one sequence needs after `num_tokens` tokens."""

    @abstractmethod
    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token, projections included, averaged over a sequence.

        A multiply and an add count as two. `num_tokens` is the length T of the sequence.
        """

    def check_input(
        self, x: Tensor, state: Any, cu_seqlens: Tensor | None, lengths: Tensor | None
    ) -> None:
        """Check what `forward` was given, before anything is computed.

        Raises:
            TypeError: if an argument is of another kind: no tensor, of another dtype, or the state
                of another mixer.
            ValueError: if a shape or a value is not as the contract says; the message names it.
        """
        check_floating(type(self).__name__, "x", x)
        if x.ndim != 3 or x.shape[-1] != self.d_model:
            raise ValueError(f"x must be (B, T, {self.d_model}), got {tuple(x.shape)}")
        if state is not None:
            self._check_state(state, x)
        if cu_seqlens is not None:
            if state is not None:
                raise ValueError("cu_seqlens packs sequences that begin here: state must be None")
            check_cu_seqlens(type(self).__name__, cu_seqlens, x)
            check_borders(type(self).__name__, cu_seqlens, x.shape[1])
        if lengths is not None:
            if state is None:
                raise ValueError("lengths needs a state: start one with init_state(batch)")
            check_lengths(type(self).__name__, lengths, x)

    def check_step(self, x: Tensor, state: Any) -> None:
        """Check what `step` was given.

        Raises:
            RuntimeError: if gradients are on: what is overwritten has none.
            TypeError: as `check_input`.
            ValueError: also if x does not hold one token of each row.
        """
        if torch.is_grad_enabled():
            raise RuntimeError(
                "step overwrites the state, so it has no gradients: "
                "call it under torch.inference_mode() or torch.no_grad()"
            )
        check_floating(type(self).__name__, "x", x)
        if x.ndim != 3 or x.shape[1:] != (1, self.d_model):
            raise ValueError(
                f"x must hold one token of each row, (B, 1, {self.d_model}), got {tuple(x.shape)}"
            )
        self._check_state(state, x)

    def _check_state(self, state: Any, x: Tensor) -> None:
        if not isinstance(state, self.state_type):
            raise TypeError(
                f"state must be a {self.state_type.__name__} of this mixer's init_state, "
                f"got {type(state).__name__}"
            )
        if torch.compiler.is_compiling():  # a state was seen before, or init_state made it
            return
        if self._state_shapes is None:
            self._state_shapes = {
                name: (value.shape[1:], value.is_floating_point())
                for name, value in self.init_state(1)._asdict().items()
            }
        grown: dict[str, int] = {}
        for name, value in state._asdict().items():
            where = f"state.{name}"
            sizes, is_floating = self._state_shapes[name]
            if is_floating:
                check_floating(type(self).__name__, where, value)
            elif not isinstance(value, Tensor) or value.dtype != torch.int64:
                raise TypeError(f"{where} must be an int64 tensor, got {_kind(value)}")
            # What grows has no tokens at first: any number of them fits.
            fits = len(value.shape) == 1 + len(sizes) and all(
                size in (0, got) for size, got in zip(sizes, value.shape[1:], strict=True)
            )
            if not fits or value.shape[0] != x.shape[0] or value.device != x.device:
                wanted = ", ".join([str(x.shape[0]), *(str(size or "any") for size in sizes)])
                raise ValueError(
                    f"{where} must be ({wanted}) on {x.device}, "
                    f"got {tuple(value.shape)} on {value.device}"
                )
            if 0 in sizes:
                grown[where] = value.shape[1 + sizes.index(0)]
        if len(set(grown.values())) > 1:
            raise ValueError(f"the fields of the state must have grown alike, got {grown}")


def _kind(value: Any) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__


class MixerConfig(Protocol):
    """A frozen dataclass that describes a mixer and builds it."""

    def build(self, d_model: int) -> AbstractMixer:
        """Build the mixer, on torch's default device."""
        ...
