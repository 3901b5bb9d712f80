"""The contract of sequence modules: what a model and a decoder may ask of a mixer, block or stack.

A paper plugs in at the size that it changes. A *mixer* mixes along time inside a block. A *block*
is a mixer with its MLP, norms and residuals. A *stack* is all layers of a model, between its
embedding and its last norm. All three map (B, T, C) to (B, T, C), causally, and keep the contract
that `AbstractSequenceModule` writes down; `mezzo_core.testing.laws` tests it.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mezzo_core.ops.checks import check_floating, check_lengths
from mezzo_core.ops.packed import check_borders, check_cu_seqlens


class AbstractSequenceModule(nn.Module, ABC):
    """A causal module along time, (B, T, C) to (B, T, C).

    One law: a full forward equals any segmentation of the sequence equals one token at a time, to
    rounding; sequences packed in one row give what each gives alone; padding changes no state.

    A state is a tuple, usually a NamedTuple, of tensors whose first axis is the batch; a stack's
    may hold further tuples. `forward` never overwrites the state that it is given. `before_step`
    and `step` do: they decode into buffers from `reserve`.

    The module holds no non-persistent buffers, because models are loaded through the meta device.
    """

    d_model: int
    """Width C of what goes in and out."""
    state_type: ClassVar[type[Any]] = tuple
    """The type that `init_state` returns."""

    _templates: "dict[torch.device, Any] | None" = None

    @abstractmethod
    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Run over a sequence, or over the next segment of one.

        Args:
            x: (B, T, C). A mixer gets it already normalized.
            state: where these tokens continue from; None for training, when no state is kept.
            cu_seqlens: (S + 1,) int32 or int64, borders of S sequences packed in one row: starts
                at 0, ends at T, never decreases; B must be 1 and `state` None.
            lengths: (B,) int64, how many of the T tokens of each row are real (the rest is padding
                on the right: its outputs mean nothing and it leaves the state alone); 0 is legal;
                needs a state. Its values are checked on the CPU only.

        Returns:
            y (B, T, C), and the state after the last real token (None if `state` was None).
        """

    @abstractmethod
    def init_state(self, batch: int) -> Any:
        """Return the state before the first token, on the device of the weights."""

    @abstractmethod
    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state, on the weights' device, of one sequence of `num_tokens`."""

    @abstractmethod
    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token, projections included, averaged over a sequence.

        A multiply and an add count as two. `num_tokens` is the length T of the sequence.
        """

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state that one sequence keeps in the host's memory, if any."""
        return 0

    def reserve(self, state: Any, num_tokens: int) -> Any:
        """Return the state with room for `num_tokens` more tokens of every row.

        Its buffers are its own, which `step` may overwrite. Reading lengths may wait for the GPU.
        """
        return tree_map(torch.clone, state)

    def before_step(self, state: Any) -> None:
        """Do what the host must do before the next `step`, such as fetching offloaded memory.

        A decoder calls it before every step, outside the CUDA graph that holds the step. It may
        wait for the GPU, and it may overwrite the state's tensors in place. By default there is
        nothing to do.

        Args:
            state: from `reserve`.
        """

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Decode one token of every row, overwriting the state in place.

        Nothing waits for the GPU and no shape depends on values, so a CUDA graph can hold the
        call. It runs without gradients. Steps beyond the reserved room raise on a CPU; on a GPU
        that would need a wait: nothing is written out of bounds, and the outputs mean nothing.

        This default serves states of fixed size; a state that grows needs `reserve` and `step` of
        its own.

        Args:
            x: (B, 1, C).
            state: from `reserve`; `before_step(state)` comes first.

        Returns:
            y (B, 1, C).

        Raises:
            RuntimeError: if gradients are on: what is overwritten has none.
            ValueError: if an argument breaks the contract, `forward` returns a state of other
                shapes, or the room is used up.
        """
        self.check_step(x, state)
        y, after = self(x, state)
        for old, new in zip(tree_leaves(state), tree_leaves(after), strict=True):
            if old.shape != new.shape:
                raise ValueError(
                    f"{type(self).__name__} must define reserve and step: its state grows, "
                    f"from {_shapes(state)} to {_shapes(after)}"
                )
            old.copy_(new)
        return y

    def init_own_weights(self) -> None:
        """Start the weights that `init_weights` cannot know, such as gates.

        `init_weights` calls it after it has drawn all matrices; a module's parts come before the
        module, so that a block or a stack can overrule them.
        """

    def units(self) -> Sequence[nn.Module]:
        """Return the parts that are sharded and compiled one at a time, in order.

        Each is a module that `forward` calls, and holds weights of its own. By default the module
        is one unit.
        """
        return (self,)

    def check_input(
        self, x: Tensor, state: Any, cu_seqlens: Tensor | None, lengths: Tensor | None
    ) -> None:
        """Check what `forward` was given, before anything is computed.

        Raises:
            TypeError: if an argument is of another kind: no tensor, of another dtype, or the state
                of another module.
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
                f"state must be a {self.state_type.__name__} of this module's init_state, "
                f"got {type(state).__name__}"
            )
        if torch.compiler.is_compiling():  # a state was seen before, or init_state made it
            return
        if self._templates is None:
            self._templates = {}
        if x.device not in self._templates:
            self._templates[x.device] = tree_map(_Leaf.of, self.init_state(1))
        self._check_like("state", state, self._templates[x.device], x.shape[0])

    def _check_like(self, where: str, value: Any, wanted: Any, batch: int) -> int | None:
        """Check a part of a state; return how many tokens it has grown to, if it is one that grows.

        `wanted` is the same part of what `init_state(1)` returns, its tensors described.
        """
        if isinstance(wanted, _Leaf):
            return self._check_tensor(where, value, wanted, batch)
        if type(value) is not type(wanted) or len(value) != len(wanted):
            raise TypeError(
                f"{where} must be a {type(wanted).__name__} of {len(wanted)}, "
                f"as init_state returns it, got {type(value).__name__}"
            )
        names = [f"{where}.{name}" for name in getattr(wanted, "_fields", range(len(wanted)))]
        grown = {
            name: self._check_like(name, part, like, batch)
            for name, part, like in zip(names, value, wanted, strict=True)
        }
        sizes = {name: size for name, size in grown.items() if size is not None}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"the fields of the state must have grown alike, got {sizes}")
        return None

    def _check_tensor(self, where: str, value: Any, wanted: "_Leaf", batch: int) -> int | None:
        if wanted.dtype.is_floating_point:
            check_floating(type(self).__name__, where, value)
        elif not isinstance(value, Tensor) or value.dtype != wanted.dtype:
            kind = str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"{where} must be an {str(wanted.dtype).removeprefix('torch.')} tensor, got {kind}"
            )
        # What grows has no tokens at first: any number of them fits.
        sizes = wanted.sizes
        fits = len(value.shape) == 1 + len(sizes) and all(
            size in (0, got) for size, got in zip(sizes, value.shape[1:], strict=True)
        )
        if not fits or value.shape[0] != batch or value.device != wanted.device:
            shape = ", ".join([str(batch), *(str(size or "any") for size in sizes)])
            raise ValueError(
                f"{where} must be ({shape}) on {wanted.device}, "
                f"got {tuple(value.shape)} on {value.device}"
            )
        return value.shape[1 + sizes.index(0)] if 0 in sizes else None


class _Leaf(NamedTuple):
    """A tensor of a state, described: `sizes` is its shape without the batch."""

    sizes: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> "_Leaf":
        return cls(tuple(tensor.shape[1:]), tensor.dtype, tensor.device)


def _shapes(state: Any) -> str:
    return ", ".join(str(tuple(tensor.shape)) for tensor in tree_leaves(state))


class AbstractMixer(AbstractSequenceModule):
    """Mixes along time; a block gives it the normalized stream, and adds what it returns."""


class AbstractBlock(AbstractSequenceModule):
    """One layer of a model: reads the residual stream, and returns the stream after it."""


class AbstractStack(AbstractSequenceModule):
    """All layers of a model: from the embedded tokens to what the last norm gets."""


class MixerConfig(Protocol):
    """A frozen dataclass that describes a mixer and builds it."""

    def build(self, d_model: int) -> AbstractMixer:
        """Build the mixer, on torch's default device."""
        ...


class BlockConfig(Protocol):
    """A frozen dataclass that describes a block and builds it."""

    def build(self, d_model: int) -> AbstractBlock:
        """Build the block, on torch's default device."""
        ...


class StackConfig(Protocol):
    """A frozen dataclass that describes a stack and builds it."""

    def build(self, d_model: int) -> AbstractStack:
        """Build the stack, on torch's default device."""
        ...
