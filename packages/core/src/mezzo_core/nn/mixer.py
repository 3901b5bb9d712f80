"""The contract of a sequence mixer: what a block, a model and a decoder may ask of one."""

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class AbstractMixer(nn.Module, ABC):
    """A module that mixes along time, (B, T, C) to (B, T, C), causally.

    A mixer holds no non-persistent buffers: models are loaded through the meta device.

    One law, tested for every mixer: a full forward equals any segmentation of the sequence equals
    one token at a time, to rounding. A state is a NamedTuple of tensors whose first axis is the
    batch. `forward` never overwrites the state that it is given; `step` does, and only it: it
    decodes into buffers from `reserve`.
    """

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
            ValueError: if `forward` returns a state of other shapes, or the room is used up.
        """
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


class MixerConfig(Protocol):
    """A frozen dataclass that describes a mixer and builds it."""

    def build(self, d_model: int) -> AbstractMixer:
        """Build the mixer, on torch's default device."""
        ...


def check_mixer_input(
    x: Tensor, d_model: int, state: Any, cu_seqlens: Tensor | None, lengths: Tensor | None
) -> None:
    """Raise a ValueError that names the argument which breaks the contract, if one does."""
    if x.ndim != 3 or x.shape[-1] != d_model:
        raise ValueError(f"x must be (B, T, {d_model}), got {tuple(x.shape)}")
    if cu_seqlens is not None and (state is not None or x.shape[0] != 1):
        raise ValueError(
            "cu_seqlens packs sequences into one row without a state: "
            f"got B = {x.shape[0]}, state {'given' if state is not None else 'None'}"
        )
    if lengths is not None:
        if state is None:
            raise ValueError("lengths needs a state: start one with init_state(batch)")
        if lengths.shape != x.shape[:1] or lengths.dtype != torch.int64:
            raise ValueError(
                f"lengths must be int64 of shape ({x.shape[0]},), got {lengths.dtype} "
                f"of shape {tuple(lengths.shape)}"
            )
        # Looking at values would stop a GPU's stream or break a graph.
        if lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = [n for n in lengths.tolist() if not 0 <= n <= x.shape[1]]
            if wrong:
                raise ValueError(f"lengths must be from 0 to T = {x.shape[1]}, got {wrong[0]}")


def check_one_token(x: Tensor, d_model: int) -> None:
    """Raise a ValueError if x is not one token of each row, (B, 1, C)."""
    check_mixer_input(x, d_model, None, None, None)
    if x.shape[1] != 1:
        raise ValueError(f"x must hold one token of each row, got {x.shape[1]}")
