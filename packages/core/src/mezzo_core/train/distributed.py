"""One process or many: who this process is, what it sums with the others, how a model is sharded.

`torchrun` sets RANK, WORLD_SIZE and LOCAL_RANK; without them the world is one process and nothing
here communicates.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from mezzo_core.errors import UserError
from mezzo_core.train.device import choose_device

_GLOO_SECONDS = 0.3


@dataclass(frozen=True)
class World:
    """This process's place among those that train together, and its device."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once."""
        return self.rank == 0

    def barrier(self) -> None:
        """Wait until every process is here."""
        if self.size > 1:
            dist.barrier()

    def sum(self, values: Tensor) -> Tensor:
        """Add `values` over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(values)
        return values

    def first_only(self, action: Callable[[], None]) -> None:
        """Run `action` in the first process while the others wait; if it fails, all raise.

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


@contextmanager
def join_world(device: str | torch.device | None = None) -> Iterator[World]:
    """Join the processes that torchrun started (NCCL on GPUs, gloo on CPUs), and leave at the end.

    Args:
        device: where to train; None takes a GPU if there is one. Each process of a node takes the
            GPU of its local rank.

    Raises:
        UserError: if a device was asked for that this machine does not have.
    """
    size = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0"))
    chosen = choose_device(device, int(os.environ.get("LOCAL_RANK", "0")) if size > 1 else None)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    if size == 1:
        yield World(chosen)
        return
    joined = not dist.is_initialized()
    if joined:
        dist.init_process_group("nccl" if chosen.type == "cuda" else "gloo")
    try:
        yield World(chosen, rank, size)
    finally:
        if joined:
            dist.destroy_process_group()
            # gloo's threads drop the tensors of the last collective, for which they need Python's
            # lock. A device mesh keeps these threads alive (torch 2.13), and a process that exits
            # before they are done aborts: give them the lock for a moment.
            time.sleep(_GLOO_SECONDS if chosen.type == "cpu" else 0)


def shard(model: nn.Module, world: World) -> None:
    """Shard `model` over the processes, in place: each of `model.blocks`, then the rest (FSDP2).

    Weights stay float32; a block's are gathered for its forward and backward and freed after. The
    gradient is averaged over processes, so a loss must be scaled by `world.size` to be summed.
    """
    if world.size == 1:
        return
    mesh = init_device_mesh(world.device.type, (world.size,))
    for part in (*model.blocks, model):  # type: ignore[misc]
        # In torch 2.8 gloo adds up where it is asked for the mean: there it is asked for the sum.
        sum_and_divide = world.device.type == "cpu"
        fully_shard(part, mesh=mesh).set_force_sum_reduction_for_comms(sum_and_divide)
