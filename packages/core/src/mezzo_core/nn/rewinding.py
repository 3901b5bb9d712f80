"""States that go back: the last tokens are taken back as if they had never come.

What a token overwrites is gone, and a recurrent memory is overwritten by each token. So beside a
state lies an older one, and the inputs since: the state now is that one after these inputs, and the
state n tokens ago is that one after all but the last n of them.
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

    Where only counters of tokens are overwritten, `before` and `inputs` are empty.

    Attributes:
        state: the module's state now.
        before: those tensors of an older state that later tokens overwrite.
        inputs: (B, 2 R, C), the module's inputs since; of each row `age` are real.
        age: (B,) int64, the tokens of each row since the older state.
        most: (B,) int64 in the host's memory, at least `age`, so that nobody waits for a GPU.
    """

    state: Any
    before: tuple[Tensor, ...]
    inputs: Tensor
    age: Tensor
    most: Tensor


class Rewinding(AbstractStack):
    """A mixer, block or stack whose states can go back by up to R tokens (`rollback`).

    It computes what the module computes, and holds no weights of its own. The state is the module's
    with what its tokens overwrite once more, and the last 2 R inputs at most. After every R tokens
    the module runs these again. Keys and values that only grow are not copied.

    A forward over more than R tokens runs about twice; so let the module itself read a long prompt,
    and go on from its state.
    """

    state_type = Kept

    def __init__(self, module: AbstractSequenceModule, room: int) -> None:
        """Wrap a module.

        Args:
            module: follows the contract.
            room: R, at least 1.
        """
        super().__init__()
        check_size("Rewinding", "room", room)
        self.d_model = module.d_model
        self.module = module
        self.room = room
        self._overwritten = module.overwritten()
        self._only_counts = only_counts(module.init_state(1), self._overwritten)

    def extra_repr(self) -> str:
        """Return the room, on which the states depend."""
        return f"room={self.room}"

    def begin(self, state: Any) -> Kept:
        """Return a state that can go back to this one of the module, and no further.

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
        """Return the state without the last n tokens of each row.

        What it computes next is what comes after the tokens that are left, up to rounding; rows of
        n = 0 are as they were. It goes on in the buffers of `state`, which is used up: of the two
        only one may `step`.

        Args:
            state: of this module, by `forward` or `reserve`.
            n: from 0 to R, for all rows or (B,) int64 for each. A row can go back to where it
                began, and to R tokens before the furthest place where it was. Values on a GPU are
                not checked.

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

        The state may be one of the module, which the result can go back to, and no further.
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
        """Check the arguments of the module's `step`, and that there is a place for the input."""
        self.check_kind(state)
        self.module.check_step(x, state.state)
        full = not self._only_counts and is_read(state.age)
        if full and (state.age >= state.inputs.shape[1]).any():
            raise ValueError("state has no place for another input: call before_step first")

    def before_step(self, state: Kept, run: Run = run_eagerly) -> None:
        """Make the older state newer, after every R steps; do what the module does."""
        self.check_kind(state)
        self.module.before_step(state.state, run)
        if self._only_counts:
            return
        if (state.most >= state.inputs.shape[1]).any():
            with torch.no_grad():
                new = self._renewed(state, state.inputs[:, :0], torch.zeros_like(state.age))
            for old, tensor in zip(state.before, new.before, strict=True):
                # Not by a copy: a window may have grown. A step does not read it. Under autocast
                # its dtype may be another.
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
        """Do what `AbstractSequenceModule.select` says; the state may be one of the module."""
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
        """Tell that all are: what is kept beside the state changes with it."""
        return (True,) * len(tree_leaves(self.init_state(1)))

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the module's state, and about those of what is kept."""
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
        """Return the older state of the module. Where tensors only grow it sees those of now."""
        before = iter(state.before)
        now = zip(tree_leaves(state.state), self._overwritten, strict=True)
        return _rebuilt(state.state, [next(before) if on else x for x, on in now])

    def _renewed(self, state: Kept, x: Tensor, added: Tensor) -> Kept:
        """Return what is kept after more inputs (B, T, C), with an older state R tokens ago.

        In rows with fewer tokens since the older state, that stays as it is.
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
    """Take rows of `now` where nothing goes back; a window that is full by now is another.

    One that is not full lacks in `then` the room that `now` has for more tokens.
    """
    then = then.to(now.dtype)
    if now.shape != then.shape:
        if any(size > room for size, room in zip(then.shape, now.shape, strict=True)):
            return then
        shorter, then = then, torch.zeros_like(now)
        then[tuple(map(slice, shorter.shape))] = shorter
    same = (amount == 0).to(now.device).view(-1, *[1] * (now.ndim - 1))
    return torch.where(same, now, then)
