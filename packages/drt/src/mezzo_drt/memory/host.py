"""Chunks in the host's memory: those that are read are brought to the device, once a group.

The host's memory is pageable, or mapped files: what torch has pinned once stays pinned, in blocks
of powers of two, so that a buffer which grows would take several times its size. What is fetched
is gathered into a small pinned block first, from which it is copied asynchronously. What is stored
comes through such a block too.
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
"""Makes a tensor on the host; its values are anything."""


def in_memory(sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Make a tensor in pageable memory.

    Raises:
        UserError: if the host has not so much memory left, or this process may not have it.
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
    """Keeps the keys and values of chunks on the host; those of retrieval stay on the device."""

    fetches = True

    def __init__(self, allocate: Allocate = in_memory) -> None:
        """Take what makes the buffers: in memory, or in files (`in_folder`)."""
        self._allocate = allocate

    def new_buffers(self, like: Memory, capacity: int) -> Memory:
        """Make those of keys and values together, so that both are known to fit.

        A host counts memory that is not written yet as free.
        """
        keys, k, _ = like
        both = self._allocate((2, len(k), capacity, *k.shape[2:]), k.dtype)
        # Autograd does not let several views of one tensor be written.
        return Memory(
            keys.new_empty(len(keys), capacity, *keys.shape[2:]), *(x.detach() for x in both)
        )

    def gather(self, memory: Memory, indices: Tensor) -> Readable:
        """Bring the chunks to the device: U of each row, at most R for each of its N chunks."""
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
        """Bring the chunks to the device; waits for a GPU."""
        if memory.k.shape[1] == 0:
            return fetched
        chosen = indices.cpu().clamp(min=0).flatten(1)
        return fetch_rows(memory, range(len(chosen)), chosen, indices.device)

    def read(self, memory: Memory, fetched: Fetched, indices: Tensor, group: int) -> Readable:
        """Return what is fetched, and where the group's chunks are in it."""
        R = indices.shape[2]
        slot = torch.arange(group * R, group * R + R, device=indices.device)
        slot = slot.expand(len(indices), 1, -1)
        return Memory(memory.keys, *fetched), slot.masked_fill(indices[:, group, None] < 0, -1)

    def store_(self, memory: Memory, encoded: Memory, due: Due) -> None:
        """Store the key of retrieval."""
        due.store_(memory.keys, encoded.keys)

    def store_rows_(
        self, memory: Memory, fetched: Fetched, indices: Tensor, encoded: Memory, rows: Tensor,
        stored: Tensor,
    ) -> None:  # fmt: skip
        """Store keys and values of the chunk, and bring what is read to the device."""
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
    """Bring the chunks (len(rows), U) of rows to the device, without waiting for the copy."""
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
        # A token at a time: torch's threads share out small pieces, but not whole chunks.
        for row, places, there in zip(rows, tokens, block.flatten(1, 2), strict=True):
            torch.index_select(part[row].view(-1, *part.shape[3:]), 0, places, out=there)
        found.append(block.to(device, non_blocking=True))
    return Fetched(*found)
