"""Keeps chunks in the host's memory; those that are read are copied to the device, once a group.

Buffers are pageable memory or mapped files. They are not pinned, because torch keeps memory pinned
that it has pinned once, in blocks of powers of two: a growing buffer would take several times its
size. So chunks are gathered into a small pinned block, and copied from there asynchronously. Chunks
to be stored come through such a block too.
"""

import math
from collections.abc import Callable, Sequence

import torch
from mezzo_core.errors import UserError
from mezzo_core.memory import available_memory
from torch import Tensor

from mezzo_drt.memory.chunks import Due, Fetched, Memory
from mezzo_drt.memory.store import AbstractStore, Readable

Allocate = Callable[[Sequence[int], torch.dtype], Tensor]
"""Allocates an uninitialized tensor on the host."""


def in_memory(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate a tensor in pageable memory.

    Raises:
        UserError: if the host or a limit of this process leaves too little memory.
    """
    needed, free = math.prod(sizes) * dtype.itemsize, available_memory()
    left = f"which has {free / 2**30:.1f} GiB left"
    if needed <= free:
        try:
            return torch.empty(*sizes, dtype=dtype, device="cpu")
        except RuntimeError:
            left = "beyond what this process may have (see ulimit -v)"
    raise UserError(
        f"offload needs {needed / 2**30:.1f} GiB more of the host's memory, {left}: "
        "give a folder for files by offload_to(folder)"
    )


class HostStore(AbstractStore):
    """Keeps keys and values of chunks on the host; keys for retrieval stay on the device."""

    fetches = True

    def __init__(self, allocate: Allocate = in_memory) -> None:
        """Take the function that allocates buffers: in memory, or in files (`in_folder`)."""
        self._allocate = allocate

    def new_buffers(self, like: Memory, capacity: int) -> Memory:
        """Allocate keys and values together, to check that both fit.

        Untouched memory still counts as free, so two checks in turn would both pass.
        """
        keys, k, _ = like
        both = self._allocate((2, len(k), capacity, *k.shape[2:]), k.dtype)
        # Detached, because autograd allows no writes to several views of one tensor.
        return Memory(
            keys.new_empty(len(keys), capacity, *keys.shape[2:]), *(x.detach() for x in both)
        )

    def gather(self, memory: Memory, indices: Tensor) -> Readable:
        """Copy the U different chunks that each row reads to the device."""
        wanted = indices.cpu()
        unique = [row[row >= 0].unique() for row in wanted]
        chosen = wanted.new_zeros(len(wanted), max(map(len, unique), default=0))
        local = torch.empty_like(wanted)
        for b, chunks in enumerate(unique):
            chosen[b, : len(chunks)] = chunks
            local[b] = torch.searchsorted(chunks, wanted[b])
        local.masked_fill_(wanted < 0, -1)
        k, v = fetch_rows(memory, range(len(wanted)), chosen, indices.device)
        return memory._replace(k=k, v=v), local.to(indices.device, non_blocking=True)

    def fetch(self, memory: Memory, indices: Tensor, fetched: Fetched) -> Fetched:
        """Copy the chunks to the device; waits for a GPU."""
        if memory.k.shape[1] == 0:
            return fetched
        chosen = indices.cpu().clamp(min=0).flatten(1)
        return fetch_rows(memory, range(len(chosen)), chosen, indices.device)

    def read(self, memory: Memory, fetched: Fetched, indices: Tensor, group: int) -> Readable:
        """Return the fetched chunks, and the indices of the group's chunks in them."""
        R = indices.shape[2]
        slot = torch.arange(group * R, group * R + R, device=indices.device)
        slot = slot.expand(len(indices), 1, -1)
        return Memory(memory.keys, *fetched), slot.masked_fill(indices[:, group, None] < 0, -1)

    def store_(self, memory: Memory, encoded: Memory, due: Due) -> None:
        """Store the key for retrieval."""
        due.store_(memory.keys, encoded.keys)

    def store_rows_(
        self, memory: Memory, fetched: Fetched, indices: Tensor, encoded: Memory, rows: Tensor,
        stored: Tensor,
    ) -> None:  # fmt: skip
        """Store keys and values of the chunk, and fetch the chunks that the next one reads."""
        for old, new in zip(memory[1:], encoded[1:], strict=True):
            old[rows, stored[rows]] = new[rows.to(new.device), 0].to(old)
        there = rows.to(indices.device)
        chosen = indices[there].cpu().clamp(min=0).flatten(1)
        found = fetch_rows(memory, rows.tolist(), chosen, indices.device)
        for old, new in zip(fetched, found, strict=True):
            old.index_copy_(0, there, new)


def fetch_rows(
    memory: Memory, rows: Sequence[int], chosen: Tensor, device: torch.device
) -> Fetched:
    """Copy the chosen chunks (len(rows), U) of rows to the device, without waiting for the copy."""
    found = []
    L = memory.k.shape[2]
    tokens = (chosen[..., None] * L + torch.arange(L, device=chosen.device)).flatten(1)
    for part in memory[1:]:
        if torch.is_grad_enabled():
            gathered = [
                part[row].index_select(0, index) for row, index in zip(rows, chosen, strict=True)
            ]
            found.append(torch.stack(gathered).to(device))
            continue
        block = torch.empty(
            *chosen.shape, *part.shape[2:],
            dtype=part.dtype, device="cpu", pin_memory=device.type == "cuda",
        )  # fmt: skip
        # Gather single tokens: torch divides these among its threads, but not whole chunks.
        for row, places, there in zip(rows, tokens, block.flatten(1, 2), strict=True):
            torch.index_select(part[row].view(-1, *part.shape[3:]), 0, places, out=there)
        found.append(block.to(device, non_blocking=True))
    return Fetched(*found)
