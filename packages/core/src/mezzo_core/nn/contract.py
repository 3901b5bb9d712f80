"""The contract of sequence modules: the methods that a mixer, a block and a stack all have.

A *mixer* mixes along time inside a block. A *block* is a mixer with its MLP, norms and residuals. A
*stack* is all layers of a model, between its embedding and its last norm. A paper implements the
smallest of the three that contains its change. All three map (B, T, C) to (B, T, C) causally and
follow the contract in `AbstractSequenceModule`, which `mezzo_core.testing.laws` tests.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mezzo_core.nn.state import (
    Leaf,
    Rows,
    as_rows,
    check_like,
    only_counts,
    reset_rows,
    select_rows,
    shapes,
    with_fewer,
)
from mezzo_core.ops.checks import check_floating, check_lengths, check_size
from mezzo_core.ops.packed import check_borders, check_cu_seqlens
from mezzo_core.ops.padding import last_real

Run = Callable[[Callable[[Any], Any], Any], Any]
"""Calls work(state) and returns what it returns."""


def run_eagerly(work: Callable[[Any], Any], state: Any) -> Any:
    """Call the work directly, where a decoder would run it in a CUDA graph."""
    return work(state)


class AbstractSequenceModule(nn.Module, ABC):
    """A causal module along time, (B, T, C) to (B, T, C).

    Every module must obey these laws, up to rounding. A forward over a whole sequence gives the
    same outputs as a forward over each of its segments in turn, and as decoding it token by token.
    Sequences packed in one row give the same outputs as each sequence alone. Padding does not
    change the state.

    A state is a tuple, usually a NamedTuple, of tensors whose first axis is the batch. The state of
    a stack may contain further tuples. `forward` never overwrites the state that it is given.
    `before_step` and `step` do: they work in the buffers that `reserve` made. Gradients flow
    through states from segment to segment. Training may go on from a state that was made in
    inference mode; `mezzo_core.ops.gradients.saveable` helps.

    The module must not have non-persistent buffers, because models are loaded through the meta
    device.
    """

    d_model: int
    """Width C of the inputs and outputs."""
    state_type: ClassVar[type[Any]] = tuple
    """The type that `init_state` returns."""

    _templates: "dict[torch.device, Any] | None" = None
    _counts: tuple[bool, ...] | None = None
    """Which tensors of a state are counters, if tokens overwrite nothing else; () if they do."""

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

        Where no tensor of the state grows, a call with a state never waits for the GPU, so
        that a CUDA graph can hold it.

        Args:
            x: (B, T, C). A mixer gets the normalized residual stream.
            state: the state after the tokens before x. None in training, where none is kept.
            cu_seqlens: (S + 1,) int32 or int64, borders of S sequences packed in one row. It starts
                at 0, ends at T and never decreases. B must then be 1 and `state` None.
            lengths: (B,) int64, the number of real tokens in each row; 0 is allowed. The others are
                padding on the right: they do not change the state, and their outputs are
                meaningless. Requires a state. The values are checked on the CPU only.

        Returns:
            y (B, T, C), and the state after the last real token (None if `state` was None).
        """

    @abstractmethod
    def init_state(self, batch: int) -> Any:
        """Return the state before the first token, on the device of the weights."""

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes that the state of a sequence of `num_tokens` takes on the device.

        This default is for states of fixed size. A module whose state grows must override it.
        """
        return sum(x.nbytes for x in tree_leaves(self.init_state(1)))

    @abstractmethod
    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs per token, averaged over a sequence, projections included.

        A multiply and an add count as two. `num_tokens` is the length T of the sequence.
        """

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return the bytes that the state of a sequence takes in the host's memory; usually 0."""
        return 0

    def reserve(self, state: Any, num_tokens: int) -> Any:
        """Return the state with room for `num_tokens` more tokens of every row.

        Its buffers are new, so `step` may overwrite them. The call may wait for the GPU.

        Raises:
            TypeError: if the state is of another kind of module, or `num_tokens` is no int.
            ValueError: if the state breaks the contract, or `num_tokens` is negative.
        """
        self.check_reserve(state, num_tokens)
        own = self.init_state(1)  # `step` needs its dtypes; the state may be of other weights
        return tree_map(lambda old, new: old.to(new.dtype, copy=True), state, own)

    def fork(self, state: Any) -> Any:
        """Return an independent copy of the state, with the same room.

        Raises:
            TypeError: if the state is of another kind of module.
            ValueError: if the state breaks the contract.
        """
        self.check_reserve(state, 0)
        return self.copy_rows(state, None)

    def select(self, state: Any, rows: Rows) -> Any:
        """Copy some rows of the state, in any order and with repeats; the room stays the same.

        Args:
            state: of a batch of B rows.
            rows: (N,) int64, each from 0 to B - 1, or ints. Values on a GPU are not checked.

        Raises:
            TypeError: if the state is of another kind of module, or `rows` holds no ints.
            ValueError: if the state breaks the contract, or a row is not there.
        """
        return self.copy_rows(state, self.check_rows("select", state, rows))

    def reset(self, state: Any, rows: Rows) -> Any:
        """Copy the state, and put some rows of the copy back before their first token.

        The room stays the same. Arguments and errors are those of `select`.
        """
        return reset_rows(state, self.check_rows("reset", state, rows), self.init_state(1))

    def copy_rows(self, state: Any, rows: Tensor | None) -> Any:
        """Copy some rows (N,) int64 of a state, or all; `fork` and `select` call it.

        A module overrides this if copies may share a part of the state that nothing overwrites, or
        if a part needs its own allocation.
        """
        return tree_map(torch.clone, state) if rows is None else select_rows(state, rows)

    def overwritten(self) -> tuple[bool, ...]:
        """Tell for each tensor of a state whether a token overwrites what earlier tokens wrote.

        To the other tensors, by default those that grow, each token only appends. A state never
        reads beyond its own tokens there, so a state that goes back can keep such a tensor. If all
        overwritten tensors are (B,) int64, they must be counters of tokens.
        """
        return tuple(0 not in x.shape for x in tree_leaves(self.init_state(1)))

    def prefill(
        self, x: Tensor, state: Any, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """Run over the next segment of a prompt, and return only its last output.

        By default all outputs are computed. A module may skip what neither the last output nor the
        state needs.

        Args:
            x: (B, T, C), T at least 1.
            state: the state after the tokens before x.
            lengths: as in `forward`.

        Returns:
            y (B, 1, C) at each row's last real token (meaningless for a row without one), and the
            state after it.
        """
        y, after = self(x, state, lengths=lengths)
        return last_real(y, lengths), after

    def look_ahead(
        self, x: Tensor, state: Any, lengths: Tensor, certain: Tensor
    ) -> tuple[Tensor, Any]:
        """Run over all tokens, but advance the state over the first `certain` of each row only.

        So a model can check the tokens that an assistant proposes: rejected ones leave no trace in
        the state. By default the certain tokens are read twice. A state in which tokens overwrite
        only counters is set back instead.

        Args:
            x: (B, T, C).
            state: the state after the tokens before x.
            lengths: (B,) int64, the number of real tokens in each row, as in `forward`.
            certain: (B,) int64, how many of these the new state has read.

        Returns:
            y (B, T, C) of all real tokens, and the state after the last certain one.
        """
        if self._counts is None:  # computed once, so that a CUDA graph allocates no new state
            overwritten = self.overwritten()
            self._counts = overwritten if only_counts(self.init_state(1), overwritten) else ()
        y, after = self(x, state, lengths=lengths)
        if self._counts:
            return y, with_fewer(after, self._counts, lengths - certain)
        return y, self(x, state, lengths=certain)[1]

    def before_step(self, state: Any, run: Run = run_eagerly) -> None:
        """Do the host's work before the next `step`, such as fetching offloaded memory.

        A decoder calls it before every step, outside the CUDA graph that contains the step. It may
        wait for the GPU, and may overwrite the state's tensors in place. By default it does
        nothing.

        Args:
            state: from `reserve`.
            run: calls a method of the module, `run(self.work, state)`. A decoder captures that
                method in a CUDA graph, so it must not wait for the GPU either, and the next call
                overwrites the tensors that it returned.
        """

    def step_waits(self) -> bool:
        """Tell whether `step` waits for the GPU, so that no CUDA graph can hold it.

        Decoders then run it eagerly. By default it does if the step of a part does.
        """
        parts = (part for part in self.modules() if isinstance(part, AbstractSequenceModule))
        return any(part.step_waits() for part in parts if part is not self)

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Decode one token of every row, overwriting the state in place.

        Unless `step_waits`, the call never waits for the GPU and no shape depends on values, so it
        can be captured in a CUDA graph. It needs gradients to be off. On a CPU, a step beyond the
        reserved room raises an error. On a GPU this check would have to wait: there such a step
        writes nothing out of bounds, but its outputs are meaningless.

        This default is for states of fixed size. A module whose state grows must override
        `reserve` and `step`, and check its room in `check_step`, if `is_read(lengths)` of
        `mezzo_core.ops.checks` says that values can be read: on a CPU, and not while compiling. A
        stack calls `check_step` of all layers first, so that an error leaves every layer's state
        unchanged.

        Args:
            x: (B, 1, C).
            state: from `reserve`; call `before_step(state)` first.

        Returns:
            y (B, 1, C).

        Raises:
            RuntimeError: if gradients are on, since an overwritten state has none.
            ValueError: if an argument breaks the contract, `forward` returns a state of other
                shapes, or the reserved room is used up.
        """
        self.check_step(x, state)
        y, after = self(x, state)
        for old, new in zip(tree_leaves(state), tree_leaves(after), strict=True):
            if old.shape != new.shape:
                raise ValueError(
                    f"{type(self).__name__} must define reserve and step: its state grows, "
                    f"from {shapes(state)} to {shapes(after)}"
                )
            old.copy_(new)
        return y

    def init_own_weights(self) -> None:
        """Initialize the weights for which `init_weights` has no rule, such as those of gates.

        `init_weights` calls it after it has drawn all matrices. It calls a module's parts before
        the module, so that a block or a stack can override the initialization of its parts.
        """

    def units(self) -> Sequence[nn.Module]:
        """Return the submodules that training shards, compiles or recomputes one at a time.

        `forward` calls each of them, in this order, and no two share weights. By default the
        module itself is the only unit.
        """
        return (self,)

    def check_input(
        self, x: Tensor, state: Any, cu_seqlens: Tensor | None, lengths: Tensor | None
    ) -> None:
        """Check the arguments of `forward`.

        Raises:
            TypeError: if an argument is not a tensor, has the wrong dtype, or is the state of
                another kind of module.
            ValueError: if a shape or a value breaks the contract; the message names the argument.
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
        """Check the arguments of `step`, without a wait for a GPU; the state stays as it is.

        Raises:
            RuntimeError: if gradients are on, since an overwritten state has none.
            TypeError: as in `check_input`.
            ValueError: as in `check_input`, if x does not have one token in each row, or, where a
                module's state grows, if a row has no room for it.
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

    def check_reserve(self, state: Any, num_tokens: int) -> None:
        """Check the arguments of `reserve`; raises as it does."""
        check_size(type(self).__name__, "num_tokens", num_tokens, 0)
        parts = [part for part in tree_leaves(state) if isinstance(part, Tensor) and part.ndim]
        self._check_state(state, parts[0] if parts else torch.empty(0))

    def check_rows(self, name: str, state: Any, rows: Rows) -> Tensor:
        """Check the arguments of `select` or `reset`; return the rows as a tensor."""
        self.check_reserve(state, 0)
        first = tree_leaves(state)[0]
        return as_rows(f"{type(self).__name__}.{name}", rows, len(first), first.device)

    def check_kind(self, state: Any) -> None:
        """Check the type of a state; raises a TypeError if it is of another kind of module."""
        if not isinstance(state, self.state_type):
            raise TypeError(
                f"state must be a {self.state_type.__name__} of this module's init_state, "
                f"got {type(state).__name__}"
            )

    def _check_state(self, state: Any, x: Tensor) -> None:
        self.check_kind(state)
        if torch.compiler.is_compiling():  # eager calls check it
            return
        self._templates = self._templates or {}
        name = type(self).__name__
        if x.device in self._templates:
            try:
                check_like(name, "state", state, self._templates[x.device], x.shape[0])
                return
            except ValueError:
                pass  # the weights may have moved since: make a new template below
        self._templates[x.device] = tree_map(Leaf.of, self.init_state(1))
        check_like(name, "state", state, self._templates[x.device], x.shape[0])


class AbstractMixer(AbstractSequenceModule):
    """Mixes along time. A block gives it the normalized residual stream and adds its output."""


class AbstractBlock(AbstractSequenceModule):
    """One layer of a model: takes the residual stream and returns the updated stream."""


class AbstractStack(AbstractSequenceModule):
    """All layers of a model: takes the embedded tokens and returns the last norm's input."""

    def stages(self) -> Sequence[AbstractSequenceModule]:
        """Return the modules whose states, in their order, are the stack's.

        `forward` calls each of them once, in this order, with its part of the state. By default
        the stack itself is the only one. Processes that share a sequence run them in a pipeline
        (`mezzo_core.train.context`).
        """
        return (self,)
