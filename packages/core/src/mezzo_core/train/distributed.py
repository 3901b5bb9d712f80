"""Training in one process or many: ranks, communication, sharding, the exchange of gradients.

`torchrun` sets RANK, WORLD_SIZE and LOCAL_RANK. Without them the world is one process, and nothing
in this file communicates. One process does not import FSDP and DTensor either, which are slow to
import.
"""

import itertools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

from mezzo_core.device import choose_device
from mezzo_core.errors import UserError
from mezzo_core.libraries import first_line
from mezzo_core.nn.sharded import has_parts

_GLOO_SECONDS = 0.3
_groups = itertools.count()

Result = TypeVar("Result")


@dataclass(frozen=True)
class World:
    """The processes that train together, this process's rank among them, and its device.

    Attributes:
        device: of this process.
        rank: of this process, from 0.
        size: the number of processes.
        context: how many of them, one after another, share each sequence.
        group: those that share this process's sequences; None if none does.
    """

    device: torch.device
    rank: int = 0
    size: int = 1
    context: int = 1
    group: "dist.ProcessGroup | None" = None

    @property
    def share(self) -> int:
        """Which of a batch's shares this process works on."""
        return self.rank // self.context

    @property
    def num_shares(self) -> int:
        """How many shares a batch has: one for all processes that share their sequences."""
        return self.size // self.context

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes the files that are written once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process has reached this call."""
        if self.size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Add `values` over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def sum_parts(self, values: Tensor) -> Tensor:
        """Add `values` over the processes that share this one's sequences, in place."""
        if self.context > 1:
            dist.all_reduce(values, group=self.group)
        return values

    def first_only(self, action: Callable[[], None]) -> None:
        """Run `action` in the first process while the others wait; if it fails, all raise an error.

        Raises:
            UserError: in the other processes, with the first one's message.
        """
        failure: Exception | None = None
        if self.is_first:
            try:
                action()
            except Exception as error:
                failure = error
        if self.size > 1:
            message = [str(failure) if failure else None]
            dist.broadcast_object_list(message, src=0)
            if not self.is_first and message[0] is not None:
                raise UserError(f"the first process failed: {message[0]}")
        if failure is not None:
            raise failure

    def each(self, action: Callable[[], Result]) -> list[Result]:
        """Run `action` in every process; return the results of all, in the order of their ranks.

        Raises:
            Exception: the error of `action`; if it fails in any process, all raise the same error.
        """
        outcome: Result | Exception
        try:
            outcome = action()
        except Exception as error:
            outcome = error
        outcomes = [outcome]
        if self.size > 1:
            outcomes *= self.size
            dist.all_gather_object(outcomes, outcome)
        results: list[Result] = []
        for found in outcomes:
            if isinstance(found, Exception):
                raise found
            results.append(found)
        return results


class Place(NamedTuple):
    """This process's rank, the number of processes, and its rank on its own machine."""

    rank: int
    size: int
    local_rank: int


def launched_place() -> Place:
    """Read this process's place from the environment variables that torchrun sets.

    Raises:
        UserError: if WORLD_SIZE, RANK or LOCAL_RANK has an impossible value.
    """
    if "WORLD_SIZE" not in os.environ:
        return Place(0, 1, 0)
    size = _whole_number("WORLD_SIZE", 1, None)
    rank, local_rank = (_whole_number(name, 0, size - 1) for name in ("RANK", "LOCAL_RANK"))
    return Place(rank, size, local_rank)


def _whole_number(name: str, least: int, most: int | None) -> int:
    text = os.environ.get(name, "0")
    allowed = f"{least} or more" if most is None else f"from {least} to {most}"
    if text.isdecimal() and len(text) < 10:
        number = int(text)
        if least <= number and (most is None or number <= most):
            return number
    raise UserError(
        f"the environment's {name} must be a whole number {allowed}, got {text[:40]!r}: "
        "start several processes with torchrun"
    )


@cache
def _meet() -> tuple[dist.Store, int, int]:
    """Meet the other processes; the store keeps what they write, so each meets them once."""
    return next(rendezvous("env://"))


def _join(backend: str) -> None:
    """Make a group of all processes, with a prefix so that no earlier group's keys are read."""
    store, rank, size = _meet()
    own = dist.PrefixStore(f"mezzo_{next(_groups)}", store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=size)


@contextmanager
def join_world(device: str | torch.device | None = None, context: int = 1) -> Iterator[World]:
    """Join the processes that torchrun started (NCCL on GPUs, gloo on CPUs), and leave at the end.

    Args:
        device: where to train; None takes a GPU if there is one. Each process of a machine takes
            the GPU of its local rank.
        context: how many processes share each sequence.

    Raises:
        UserError: if this machine does not have the device, the environment variables do not tell
            the address of the other processes, or `context` does not divide their number.
    """
    rank, size, local_rank = launched_place()
    if size % context:
        raise UserError(
            f"context_parallel = {context} must divide the number of processes, {size}: "
            "start them with torchrun"
        )
    chosen = choose_device(device, local_rank if size > 1 else None)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(chosen)
        return
    joined = not dist.is_initialized()
    if joined:
        try:
            _join("nccl" if chosen.type == "cuda" else "gloo")
        except (ValueError, RuntimeError, OSError) as error:
            raise UserError(
                f"process {rank} cannot reach the {size - 1} others ({first_line(error)}): "
                "start several processes with torchrun"
            ) from error
    try:
        group = dist.new_subgroups(context)[0] if context > 1 else None
        yield World(chosen, rank, size, context, group)
    finally:
        if joined:
            dist.destroy_process_group()
            # gloo's threads need Python's global lock to free the tensors of the last collective.
            # A device mesh keeps these threads alive (torch 2.13), and a process that exits before
            # they are done aborts. Sleeping lets them have the lock.
            time.sleep(_GLOO_SECONDS if chosen.type == "cpu" else 0)


def shard(model: nn.Module, units: Sequence[nn.Module], world: World) -> None:
    """Shard `model` over the processes, in place (FSDP2).

    A unit's weights are gathered for its forward and its backward, and freed after each; the
    weights outside of all units are gathered as one more group. They are gathered in float32, and
    autocast rounds what is multiplied: FSDP2 has one dtype a group, and in bf16 it would round
    gates and norm scales too, so that a sharded model would not compute what a whole one does. All
    processes have the same weights before. The units are those of the model's `units()`.
    """
    if world.size == 1:
        return
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in (*units, model):
        # In torch 2.8 gloo returns the sum where the mean is requested. So the sum is requested,
        # and divided afterwards.
        sum_and_divide = world.device.type == "cpu"
        fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(sum_and_divide)


def backward(loss: Tensor, model: nn.Module, world: World, *, is_last: bool) -> None:
    """Add the gradient of the sum of all processes' losses to that of the model's weights.

    Processes exchange gradients, in float32, in the backward of the last micro batch alone. Until
    then each adds up its own gradients of the whole model: 4 bytes a parameter, even if the weights
    are sharded. A copy that is not sharded needs 4 more during the exchange.

    `loss` is this process's part of the loss of one micro batch; `is_last` says whether this is the
    last one before the optimizer's step.
    """
    if has_parts(model):
        model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        loss = loss * world.size  # FSDP averages gradients over the processes
    loss.backward()
    if is_last and world.size > 1 and not has_parts(model):
        _sum_gradients(model, world)


def _sum_gradients(model: nn.Module, world: World) -> None:
    """Add the gradients over the processes in one exchange, of one buffer, after the backward."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = [
        # A weight that this process has not used may have been used by another.
        weight.new_zeros(weight.numel()) if weight.grad is None else weight.grad.flatten()
        for weight in weights
    ]
    total = world.sum(torch.cat(gradients))
    for weight, part in zip(weights, total.split([len(part) for part in gradients]), strict=True):
        weight.grad = part.view_as(weight)
