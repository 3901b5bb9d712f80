"""States that go back: `rollback` undoes the last tokens, as if they had never come.

Each token overwrites a recurrent state, and what is overwritten is gone. So a `Rewinding` also
keeps an older state and the module's inputs since then. To go back by n tokens, it runs the module
from the older state over all but the last n of these inputs.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from mezzo_core.nn.contract import AbstractSequenceModule, AbstractStack, Run, run_eagerly
from mezzo_core.nn.state import Rows, only_counts, reset_rows, select_rows, with_fewer
from mezzo_core.ops.checks import can_look, check_size, is_read
from mezzo_core.ops.named_tuples import replaced

Parts = TypeVar("Parts")


class Kept(NamedTuple):
    """State of a `Rewinding`.

    If tokens overwrite only counters, `before` and `inputs` are empty.

    Attributes:
        state: the module's state now.
        before: the tensors of an older state that tokens overwrite.
        inputs: (B, 2 R, C), the module's inputs since the older state; the first `age` are real.
        age: (B,) int64, the tokens of each row since the older state.
        most: (B,) int64 on the host, an upper bound of `age`, read without waiting for the GPU.
    """

    state: Any
    before: tuple[Tensor, ...]
    inputs: Tensor
    age: Tensor
    most: Tensor


class Rewinding(AbstractStack):
    """A mixer, block or stack whose states can go back by up to R tokens (`rollback`).

    It computes what the module computes, and adds no weights. Its state holds the module's state, a
    second copy of the tensors that tokens overwrite, and at most 2 R inputs. Every R tokens the
    module runs again over R inputs, to advance the older state. Keys and values that only grow are
    not copied.

    A forward over more than R tokens runs about twice. So let the module itself read a long prompt,
    and go on from its state. No CUDA graph can hold a forward with a state: it counts on the host.
    """

    state_type = Kept

    def __init__(self, module: AbstractSequenceModule, room: int) -> None:
        """Wrap a module; room is R, at least 1."""
        super().__init__()
        check_size("Rewinding", "room", room)
        self.d_model = module.d_model
        self.module = module
        self.room = room
        self._overwritten = module.overwritten()
        self._only_counts = only_counts(module.init_state(1), self._overwritten)

    def extra_repr(self) -> str:
        """Return the room: `save_state` compares it, because the states depend on it."""
        return f"room={self.room}"

    def begin(self, state: Any) -> Kept:
        """Start from a state of the module; `rollback` can go back to it, but no further.

        Raises:
            TypeError: if the state is of another kind of module.
            ValueError: if the state breaks the contract.
        """
        self.module.check_reserve(state, 0)
        before = () if self._only_counts else self._changing(state)
        weight = next(self.module.parameters(), tree_leaves(state)[0])
        batch, size = len(tree_leaves(state)[0]), 0 if self._only_counts else 2 * self.room
        inputs = torch.zeros(batch, size, self.d_model, dtype=weight.dtype, device=weight.device)
        age = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return Kept(state, before, inputs, age, torch.zeros_like(age, device="cpu"))

    def rollback(self, state: Kept, n: int | Tensor) -> Kept:
        """Return the state before the last n tokens of each row, up to rounding.

        Rows with n = 0 do not change. The result shares buffers with `state`: do not `step` both.

        Args:
            state: of this module, by `forward` or `reserve`.
            n: from 0 to R, for all rows or (B,) int64 for each. A row cannot go back beyond its
                `begin`, nor more than R tokens behind the furthest point that it reached. Values on
                a GPU are not checked.

        Raises:
            TypeError: if the state is of another kind of module, or n is no integer.
            ValueError: if n is out of range.
        """
        self.check_reserve(state, 0)
        amount = self._amount(state, n)
        if (can_look(n) and not n.any()) if isinstance(n, Tensor) else n == 0:
            return state
        if self._only_counts:
            fewer = with_fewer(state.state, self._overwritten, amount)
            return replaced(state, state=fewer, age=state.age - amount)
        left = state.age - amount
        inputs = state.inputs[:, : int(state.most.max())]
        _, back = self.module(inputs, self._older(state), lengths=left)
        leaves = [
            _where_none(amount, now, then) if on else now
            for now, then, on in zip(
                tree_leaves(state.state), tree_leaves(back), self._overwritten, strict=True
            )
        ]
        return replaced(state, state=_rebuilt(state.state, leaves), age=left)

    def forward(
        self,
        x: Tensor,
        state: Kept | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Kept | None]:
        """Run the module; arguments and results as `AbstractStack.forward` says.

        A state of the module itself is taken as by `begin`.
        """
        if state is None:
            return self.module(x, None, cu_seqlens=cu_seqlens, lengths=lengths)
        if not isinstance(state, Kept):
            state = self.begin(state)
        y, after = self.module(x, state.state, cu_seqlens=cu_seqlens, lengths=lengths)
        added = torch.full_like(state.age, x.shape[1]) if lengths is None else lengths
        most = state.most + x.shape[1]
        if self._only_counts:
            kept = replaced(state, age=state.age + added)
        elif int(most.max()) <= state.inputs.shape[1]:
            index = state.age[:, None] + torch.arange(x.shape[1], device=x.device)
            index = index[..., None].expand(-1, -1, x.shape[2])
            inputs = state.inputs.scatter(1, index, x.detach().to(state.inputs.dtype))
            kept = replaced(state, inputs=inputs, age=state.age + added, most=most)
        else:
            kept = self._renewed(state, x.detach(), added)
        return y, replaced(kept, state=after)

    def step(self, x: Tensor, state: Kept) -> Tensor:
        """Decode one token of every row, overwriting the state in place."""
        self.check_step(x, state)
        y = self.module.step(x, state.state)
        if not self._only_counts:
            rows = torch.arange(len(x), device=x.device)
            slot = state.age.clamp(max=state.inputs.shape[1] - 1)
            state.inputs[rows, slot] = x[:, 0].to(state.inputs.dtype)
        state.age.add_(1)
        return y

    def check_step(self, x: Tensor, state: Kept) -> None:
        """Check the arguments of the module's `step`, and that there is room for the input."""
        self.check_kind(state)
        self.module.check_step(x, state.state)
        full = not self._only_counts and is_read(state.age)
        if full and (state.age >= state.inputs.shape[1]).any():
            raise ValueError("state has no place for another input: call before_step first")

    def before_step(self, state: Kept, run: Run = run_eagerly) -> None:
        """Call the module's `before_step`; every R steps, advance the older state."""
        self.check_kind(state)
        self.module.before_step(state.state, run)
        if self._only_counts:
            return
        if (state.most >= state.inputs.shape[1]).any():
            with torch.no_grad():
                new = self._renewed(state, state.inputs[:, :0], torch.zeros_like(state.age))
            for old, tensor in zip(state.before, new.before, strict=True):
                # Replace the tensor, as its shape changes where a window has grown; no step reads
                # it, so a CUDA graph does not mind. Under autocast its dtype may differ too.
                tensor = tensor.to(old.dtype)
                place = tensor.untyped_storage(), tensor.storage_offset()
                old.set_(*place, tensor.shape, tensor.stride())
            for old, tensor in zip(state[2:], new[2:], strict=True):
                old.copy_(tensor)
        state.most.add_(1)

    def reserve(self, state: Kept, num_tokens: int) -> Kept:
        """Return the state with room for `num_tokens` more tokens of every row, for `step`."""
        self.check_reserve(state, num_tokens)
        return Kept(self.module.reserve(state.state, num_tokens), *tree_map(torch.clone, state[1:]))

    def select(self, state: Any, rows: Rows) -> Kept:
        """As `AbstractSequenceModule.select`; a state of the module is taken as by `begin`."""
        return super().select(state if isinstance(state, Kept) else self.begin(state), rows)

    def copy_rows(self, state: Kept, rows: Tensor | None) -> Kept:
        """Return a copy of the module's state and of what is kept."""
        rest = tree_map(torch.clone, state[1:]) if rows is None else select_rows(state[1:], rows)
        return Kept(self.module.copy_rows(state.state, rows), *rest)

    def reset(self, state: Kept, rows: Rows) -> Kept:
        """Return a state in which some rows are before their first token."""
        places = self.check_rows("reset", state, rows)
        rest = reset_rows(state[1:], places, self.init_state(1)[1:])
        return Kept(self.module.reset(state.state, rows), *rest)

    def init_state(self, batch: int) -> Kept:
        """Return the state before the first token."""
        return self.begin(self.module.init_state(batch))

    def overwritten(self) -> tuple[bool, ...]:
        """Tell that every tensor is overwritten."""
        return (True,) * len(tree_leaves(self.init_state(1)))

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the state, where those of the older state are an estimate."""
        kept = sum(x.nbytes for x in tree_leaves(self.init_state(1)[1:]))
        return self.module.state_bytes(num_tokens) + kept

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return what the module says."""
        return self.module.host_state_bytes(num_tokens)

    def flops_per_token(self, num_tokens: int) -> float:
        """Return what the module says."""
        return self.module.flops_per_token(num_tokens)

    def units(self) -> Sequence[nn.Module]:
        """Return what the module says."""
        return self.module.units()

    def _check_state(self, state: Any, x: Tensor) -> None:
        self.check_kind(state)
        self.module._check_state(state.state, x)
        wanted = (len(x), 0 if self._only_counts else 2 * self.room, self.d_model)
        if state.inputs.shape != wanted or state.age.shape != wanted[:1]:
            raise ValueError(
                f"state must be one that can go back by {self.room} tokens, with inputs {wanted}, "
                f"got {tuple(state.inputs.shape)} of {len(state.age)} rows"
            )

    def _changing(self, state: Any) -> tuple[Tensor, ...]:
        """Return the tensors of a module's state that later tokens overwrite."""
        return tuple(x for x, on in zip(tree_leaves(state), self._overwritten, strict=True) if on)

    def _older(self, state: Kept) -> Any:
        """Return the older state of the module; it shares the tensors that only grow."""
        before = iter(state.before)
        now = zip(tree_leaves(state.state), self._overwritten, strict=True)
        return _rebuilt(state.state, [next(before) if on else x for x, on in now])

    def _renewed(self, state: Kept, x: Tensor, added: Tensor) -> Kept:
        """Add inputs (B, T, C), and advance the older state to R tokens before the last input.

        Rows with fewer than R tokens since the older state keep it.
        """
        size, T = state.inputs.shape[1], x.shape[1]
        j = torch.arange(size + T, device=x.device)
        index = torch.where(j < state.age[:, None], j, j - state.age[:, None] + size)
        both = torch.cat([state.inputs, x.to(state.inputs.dtype)], 1)
        inputs = _gather(both, index.clamp(max=size + T - 1))
        passed = (state.age + added - self.room).clamp(min=0)
        bound = int(state.most.max()) + T
        _, before = self.module(
            inputs[:, : max(bound - self.room, 0)], self._older(state), lengths=passed
        )
        j = torch.arange(size, device=x.device) + passed[:, None]
        return Kept(
            state.state,
            self._changing(before),
            _gather(inputs, j.clamp(max=size + T - 1)),
            state.age + added - passed,
            torch.full_like(state.most, self.room),
        )

    def _amount(self, state: Kept, n: int | Tensor) -> Tensor:
        """Return n as a tensor (B,) on the device of `age`."""
        if isinstance(n, Tensor):
            if n.dtype != torch.int64 or n.shape != state.age.shape:
                raise TypeError(
                    f"n must be an int or int64 of shape {tuple(state.age.shape)}, "
                    f"got {n.dtype} of shape {tuple(n.shape)}"
                )
            amount = n.to(state.age.device)
        else:
            check_size("rollback", "n", n, 0)
            if n > self.room:
                raise ValueError(f"n must be at most {self.room}, the room to go back, got {n}")
            amount = torch.full_like(state.age, n)
        if is_read(amount) and amount.numel():
            least, most = (int(end) for end in amount.aminmax())
            if least < 0 or most > self.room:
                raise ValueError(
                    f"n must be from 0 to {self.room}, the room to go back, "
                    f"got {least if least < 0 else most}"
                )
            if (amount > state.age).any():
                row = int((amount > state.age).nonzero()[0])
                raise ValueError(
                    f"n must be at most {int(state.age[row])} in row {row}, which can go back no "
                    f"further, got {int(amount[row])}"
                )
        return amount


def _rebuilt(state: Any, leaves: list[Tensor]) -> Any:
    return tree_unflatten(leaves, tree_flatten(state)[1])


def _gather(x: Tensor, index: Tensor) -> Tensor:
    """Take tokens (B, N) of x (B, T, C)."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[2]))


def _where_none(amount: Tensor, now: Tensor, then: Tensor) -> Tensor:
    """Take rows of `now` where nothing goes back (amount is 0), and of `then` elsewhere.

    The shapes differ if a window has grown: `then` gets the shape of `now`, unless it is larger.
    """
    then = then.to(now.dtype)
    if now.shape != then.shape:
        if any(size > room for size, room in zip(then.shape, now.shape, strict=True)):
            return then
        shorter, then = then, torch.zeros_like(now)
        then[tuple(map(slice, shorter.shape))] = shorter
    same = (amount == 0).to(now.device).view(-1, *[1] * (now.ndim - 1))
    return torch.where(same, now, then)
