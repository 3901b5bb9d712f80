"""One sequence over several processes (context parallelism): states go from process to process.

Each process has a part of every row. For each block it receives the state after the tokens before
its own, runs the block, and sends the new state to the next process. That one then runs this block,
while the first runs the block above: a pipeline, whose P processes take (P - 1) / depth longer than
their work. In the backward the gradients of states go back the same way. So every module that keeps
the contract of `mezzo_core.nn.contract` can share its sequence. What is sent is its state, which in
a recurrent mixer has the same size for every T.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_flatten, tree_unflatten

from mezzo_core.data import Batch
from mezzo_core.errors import UserError
from mezzo_core.nn.contract import AbstractSequenceModule, AbstractStack
from mezzo_core.nn.lm import LM
from mezzo_core.train.distributed import World

Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and the dtype of a tensor."""
_UNDERWAY: "deque[tuple[dist.Work, Tensor]]" = deque()
"""What this process has sent, from the oldest: it must live until it has arrived."""
_MOST = 64
"""The most tensors that are under way before their sender waits, as in a long evaluation."""
_ATTENTION_COST = 2
"""A FLOP of attention counts as so many of a matrix product, for its kernels take longer: RAT's and
those of its projections are in core's results, kernels.json."""


def part_borders(model: LM, num_tokens: int, count: int) -> tuple[int, ...]:
    """Return where the parts of a sequence begin and end, so that all take as long.

    Later tokens of attention have more to attend to, so that later parts are shorter. Borders in
    long sequences are multiples of 128, which tiles and most chunks divide.

    Returns:
        count + 1 numbers, from 0 to `num_tokens`.

    Raises:
        UserError: if there are fewer tokens than parts.
    """
    if not 1 <= count <= num_tokens:
        raise UserError(
            f"a sequence of {num_tokens} tokens cannot be divided by context_parallel = {count}"
        )

    first = model.flops_per_token(1)

    def work(end: int) -> float:
        return end * (first + _ATTENTION_COST * (model.flops_per_token(end) - first))

    step = 128 if num_tokens >= 128 * 16 * count else 1
    borders, share = [0], work(num_tokens) / count
    for i in range(1, count):
        even = bisect_left(range(num_tokens), i * share * (1 - 1e-9), key=work)
        rounded = (even + step // 2) // step * step
        borders.append(min(max(rounded, borders[-1] + 1), num_tokens - count + i))
    return (*borders, num_tokens)


def sequence_part(batch: Batch, borders: Sequence[int], rank: int) -> Batch:
    """Return this rank's part of each row, among the processes that share it.

    Raises:
        UserError: if documents are packed, which are no rows, or rows have another length.
    """
    if len(borders) == 2:
        return batch
    if batch.cu_seqlens is not None:
        raise UserError("packed documents cannot be shared by processes: set context_parallel = 1")
    T = batch.tokens.shape[1]
    if borders[-1] != T:
        raise UserError(f"rows must have the {borders[-1]} tokens that are shared, got {T}")
    # Targets are already shifted, so that the last one is here and not in the next part.
    here = slice(borders[rank], borders[rank + 1])
    return Batch(batch.tokens[:, here], batch.targets[:, here])


def own_parts(share: Batch, count: int, world: World, borders: Sequence[int]) -> Iterator[Batch]:
    """Yield the micro batches of a share of a batch: this process's part of their sequences."""
    for i in range(count):
        yield sequence_part(share.part(i, count), borders, world.rank % world.context)


def share_sequence(
    stack: AbstractStack, borders: Sequence[int], group: "dist.ProcessGroup | None" = None
) -> None:
    """From now on, let the stack's forward go on where that of the process before it ends.

    Each process calls it, and then runs the stack, without a state, on its part of every row
    (`sequence_part`). Up to rounding, outputs equal those of one process with whole rows, and so do
    the gradients of weights, added up over the processes. Run the backward for all trained weights,
    as `loss.backward()` does: each process waits for the next one's.

    The stack's `stages` run in a pipeline. A stack that is its own only stage runs in one process
    after another: a sequence may then be longer than a GPU's memory allows, but its parts do not
    run at the same time.

    Args:
        stack: of a model, with the same weights in every process. Call this once its forward
            computes activations again, if it is to, and before FSDP.
        borders: of the parts, from 0 to T, such as `part_borders` returns.
        group: the processes, in the order of the parts; None for all.

    Raises:
        ValueError: if there are not as many parts as processes.
        UserError: if the stack keeps a part of its state in the host's memory.
    """
    chain = Chain(group)
    if len(borders) != chain.size + 1:
        raise ValueError(f"borders must be those of {chain.size} parts, got {tuple(borders)}")
    if chain.size == 1:
        return
    if stack.host_state_bytes(borders[-1]):
        raise UserError(
            f"{type(stack).__name__} keeps a part of its state in the host's memory, from which "
            "processes cannot send it (context_parallel): set offload to False"
        )
    num_tokens = borders[chain.rank + 1] - borders[chain.rank]
    for stage in stack.stages():
        stage.forward = _Part(stage, chain, num_tokens)  # type: ignore[method-assign]


class Chain:
    """This process's place among those that share a sequence, and what it sends and receives.

    Both sides of a pair send and receive in the same order: the states of all blocks from the
    first, in the backward their gradients from the last. A process does not wait for what it sends,
    so all must meet (a sum of gradients or losses) before one ends.
    """

    def __init__(self, group: "dist.ProcessGroup | None") -> None:
        self._group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._forms: dict[tuple[int, Hashable], list[Form]] = {}

    def tell_forms(self, to: int, key: Hashable, forms: list[Form]) -> None:
        """Send the forms of tensors, once for each key: the receiver keeps them.

        Raises:
            ValueError: if they are others than those that were sent with this key.
        """
        if (to, key) not in self._forms:
            dist.send_object_list([forms], group=self._group, group_dst=to)
        if self._forms.setdefault((to, key), forms) != forms:
            raise ValueError(
                f"states after as many tokens must have the same shapes to be sent, got {forms} "
                f"after {self._forms[to, key]}"
            )

    def hear_forms(self, source: int, key: Hashable) -> list[Form]:
        """Return what `tell_forms` told; it waits for the device in the first call with a key."""
        if (source, key) not in self._forms:
            told: list[Any] = [None]
            dist.recv_object_list(told, group=self._group, group_src=source)
            self._forms[source, key] = told[0]
        return self._forms[source, key]

    def send(self, to: int, tensors: Sequence[Tensor]) -> None:
        """Send tensors, and keep them until they have arrived."""
        for tensor in tensors:
            if tensor.numel():
                tensor = tensor.detach().contiguous()
                work = dist.isend(tensor, group=self._group, group_dst=to)
                _UNDERWAY.append((cast(dist.Work, work), tensor))
        _let_go()

    def receive(self, source: int, forms: Sequence[Form], device: torch.device) -> list[Tensor]:
        """Return the tensors that `source` has sent; on a GPU its stream waits, not the host."""
        _let_go()  # in its backward the first process only receives
        tensors = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in forms]
        for tensor in tensors:
            if tensor.numel():
                dist.recv(tensor, group=self._group, group_src=source)
        return tensors


def _let_go() -> None:
    """Free what has arrived, and wait where too much is under way."""
    while _UNDERWAY and (len(_UNDERWAY) > _MOST or _UNDERWAY[0][0].is_completed()):
        _UNDERWAY.popleft()[0].wait()


class _Part:
    """The forward of a stage of a stack on this process's part of every row."""

    def __init__(self, stage: AbstractSequenceModule, chain: Chain, num_tokens: int) -> None:
        self.stage, self.chain, self.num_tokens = stage, chain, num_tokens
        self.run = stage.forward
        # A decorator would import the compiler, which takes seconds, wherever this module is used.
        self.before = torch.compiler.disable(self._before)
        self.after = torch.compiler.disable(self._after)

    def __call__(
        self, x: Tensor, state: Any = None, *further: Any, **options: Any
    ) -> tuple[Tensor, None]:
        """Map (B, T, C), with the T tokens of this part, from the state of the part before it."""
        if any(options.get(name) is not None for name in ("cu_seqlens", "lengths")):
            raise ValueError("cu_seqlens and lengths must be None where processes share a sequence")
        if state is not None:
            raise ValueError("state must be None where processes share a sequence: it is passed on")
        if x.shape[1] != self.num_tokens:
            raise ValueError(
                f"x must be this process's part of a shared sequence, {self.num_tokens} tokens, "
                f"got {tuple(x.shape)}"
            )
        x, state = self.before(x)
        y, state = self.run(x, state, *further, **options)
        return self.after(x, y, state), None

    def _before(self, x: Tensor) -> tuple[Tensor, Any]:
        """Return x, and the state that comes from the process before this one."""
        first = self.stage.init_state(len(x))
        if self.chain.rank == 0:
            return x, first
        # On both sides of a pair the backward runs under the same condition.
        trains = any(weight.requires_grad for weight in self.stage.parameters())
        if torch.is_grad_enabled() and trains and not x.requires_grad:
            x = x.detach().requires_grad_()
        x, *leaves = _Received.apply(x, self.chain, self._key(x))
        return x, tree_unflatten(leaves, tree_flatten(first)[1])

    def _after(self, x: Tensor, y: Tensor, state: Any) -> Tensor:
        """Return y, and send the state to the process after this one."""
        if self.chain.rank + 1 == self.chain.size:
            return y
        return _Sent.apply(y, self.chain, self._key(x), *tree_flatten(state)[0])

    def _key(self, x: Tensor) -> Hashable:
        """Return what the forms of the state between two parts depend on, alike for both."""
        kind = x.device.type
        low = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        return self.stage, len(x), x.dtype, low


class _Received(torch.autograd.Function):
    """x, and the tensors of a state from the process before, which gets their gradients.

    x comes along so that the backward, which x's gradient needs, sends them.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, chain: Chain, key: Hashable) -> tuple[Tensor, ...]:
        ctx.chain = chain
        leaves = chain.receive(chain.rank - 1, chain.hear_forms(chain.rank - 1, key), x.device)
        ctx.is_float = [leaf.is_floating_point() for leaf in leaves]
        ctx.mark_non_differentiable(*(leaf for leaf in leaves if not leaf.is_floating_point()))
        return x.view_as(x), *leaves

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        floats = [d for d, is_float in zip(gradients, ctx.is_float, strict=True) if is_float]
        ctx.chain.send(ctx.chain.rank - 1, floats)
        return dx, None, None


class _Sent(torch.autograd.Function):
    """y, once the tensors of a state are on their way to the process after this one.

    y comes along so that its backward receives their gradients.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, chain: Chain, key: Hashable, *leaves: Tensor) -> Tensor:
        ctx.chain, ctx.device = chain, y.device
        ctx.forms = [
            (tuple(leaf.shape), leaf.dtype) if leaf.is_floating_point() else None for leaf in leaves
        ]
        chain.tell_forms(chain.rank + 1, key, [(tuple(x.shape), x.dtype) for x in leaves])
        chain.send(chain.rank + 1, leaves)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        forms = [form for form in ctx.forms if form]
        found = iter(ctx.chain.receive(ctx.chain.rank + 1, forms, ctx.device))
        return dy, None, None, *(next(found) if form else None for form in ctx.forms)
