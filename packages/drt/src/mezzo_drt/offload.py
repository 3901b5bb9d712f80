"""Chunks in the host's memory: those that are read are brought to the device, once a group.

The host's memory is pageable, or mapped files: what torch has pinned once stays pinned, in blocks
of powers of two, so that a buffer which grows would take several times its size. What is fetched
is gathered into a small pinned block first, from which it is copied asynchronously. What is stored
comes through such a block too.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_drt.encoder import Memory


class Fetched(NamedTuple):
    """The chunks that the open chunk reads, on the device; empty without offload.

    Attributes:
        k: (B, G R, L, H, D), keys, group after group; anything where nothing is read.
        v: likewise, values.
    """

    k: Tensor
    v: Tensor


def fetch(memory: Memory, indices: Tensor) -> tuple[Memory, Tensor]:
    """Bring the chunks that a segment reads to the device, each once.

    Waits for a GPU. The device needs room for at most R chunks for each chunk of the segment.

    Args:
        memory: whose keys and values the host has.
        indices: (B, N, R) on the device, which chunks are read; -1 for none.

    Returns:
        The memory with U chunks of each row, and the indices of the same chunks in it.
    """
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


def bring(new: Memory) -> Memory:
    """Bring the keys and values of new chunks to the host, in pinned blocks; waits for a GPU."""

    def brought(part: Tensor) -> Tensor:
        if part.device.type != "cuda":
            return part
        block = torch.empty(part.shape, dtype=part.dtype, device="cpu", pin_memory=True)
        return block.copy_(part)

    return new._replace(k=brought(new.k), v=brought(new.v))


def fetch_open(memory: Memory, indices: Tensor) -> Fetched:
    """Bring the chunks that the open chunks of all rows read, (B, G, R); waits for a GPU."""
    chosen = indices.cpu().clamp(min=0).flatten(1)
    if memory.k.shape[1]:
        return fetch_rows(memory, range(len(chosen)), chosen, indices.device)
    sizes = (*chosen.shape, *memory.k.shape[2:])
    return Fetched(*(part.new_zeros(sizes, device=indices.device) for part in memory[1:]))


def fetch_open_(fetched: Fetched, memory: Memory, indices: Tensor, rows: Tensor) -> None:
    """Do `fetch_open` for some rows (n,) of the batch, overwriting what they had fetched."""
    there = rows.to(indices.device)
    chosen = indices[there].cpu().clamp(min=0).flatten(1)
    found = fetch_rows(memory, rows.tolist(), chosen, indices.device)
    for old, new in zip(fetched, found, strict=True):
        old.index_copy_(0, there, new)


def store_(memory: Memory, encoded: Memory, rows: Tensor, slots: Tensor) -> None:
    """Store keys and values of a chunk (B, 1, ...) of some rows (n,) in the host's slots (n,)."""
    for old, new in zip(memory[1:], encoded[1:], strict=True):
        old[rows, slots] = new[rows.to(new.device), 0].to(old)


def fetch_rows(
    memory: Memory, rows: Sequence[int], chosen: Tensor, device: torch.device
) -> Fetched:
    """Bring chunks of some rows to the device, without waiting for the copy.

    Args:
        memory: whose keys and values the host has.
        rows: of the batch.
        chosen: (len(rows), U) in the host's memory, which chunks of each.
        device: to which they go.
    """
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
            (*chosen.shape, *part.shape[2:]),
            dtype=part.dtype,
            device="cpu",
            pin_memory=device.type == "cuda",
        )
        # A token at a time: torch's threads share out small pieces, but not whole chunks.
        for row, places, there in zip(rows, tokens, block.flatten(1, 2), strict=True):
            torch.index_select(part[row].view(-1, *part.shape[3:]), 0, places, out=there)
        found.append(block.to(device, non_blocking=True))
    return Fetched(*found)


def slots(indices: Tensor, group: int) -> Tensor:
    """Return where a group's chunks are in `Fetched`: (B, G, R) to (B, 1, R); -1 for none."""
    R = indices.shape[2]
    slot = torch.arange(group * R, group * R + R, device=indices.device)
    return slot.expand(len(indices), 1, -1).masked_fill(indices[:, group, None] < 0, -1)
