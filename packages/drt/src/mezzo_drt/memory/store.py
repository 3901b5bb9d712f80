"""Stores of complete chunks: what all stores share, and how memory grows in place.

A state's memory is a view of the first S chunks of buffers with room for more. Several states may
share the same buffers. A `Room`, found by the buffers' storage, counts the filled chunks: only a
state that sees all of them is the newest, and may append in place. Other states copy first. So do
copies of a state, whose storage has no `Room`.
"""

from abc import ABC, abstractmethod
from threading import Lock
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from mezzo_drt.memory.chunks import Due, Fetched, Memory
from mezzo_drt.places import Continued, take

Readable = tuple[Memory, Tensor]
"""Memory on the device, and indices into it of the chunks that are read; -1 for none."""


class AbstractStore(ABC):
    """Keeps the complete chunks of states."""

    fetches: ClassVar[bool]
    """Whether `gather` copies chunks. If not, a backward reads the buffers: nothing may change."""

    def append(self, memory: Memory, new: Memory, continued: Continued) -> Memory:
        """Return the memory with the chunks that a call completes, of the N chunks in `new`.

        Without gradients they are appended in place if possible (`append_`). Otherwise the memory
        is copied, with room for twice the chunks, so that copies become rare. With gradients
        nothing may be overwritten later: the copy has no room, and a call that completes no chunk
        closes the room, or copies if another state may have written to it.
        """
        if not continued.num_done:
            if torch.is_grad_enabled() and not self.fetches and not _close(memory):
                return Memory(*(part.clone() for part in memory))
            return memory
        if torch.is_grad_enabled():
            pairs = zip(memory, new, strict=True)
            return Memory(*(_extended(*pair, continued) for pair in pairs))
        new = Memory(*(_brought(*pair) for pair in zip(new, memory, strict=True)))
        appended = self.append_(memory, new, continued)
        return self._copied(memory, new, continued) if appended is None else appended

    def append_(self, memory: Memory, new: Memory, continued: Continued) -> Memory | None:
        """Append in place; return None, and do nothing, if that is impossible.

        It is possible if no other state has appended, all rows write at the same chunk, and the
        dtypes are the same.
        """
        S, end, room = memory.keys.shape[1], continued.num_after, room_of(memory)
        fits = continued.writes_at == S and _may_write(memory, new)
        if room is None or not fits or not room.take(S, end, end):
            return None
        whole = whole_buffers(memory)
        for part, added in zip(whole, new, strict=True):
            part[:, S:end] = added[:, : end - S]
        return Memory(*(part[:, :end] for part in whole))

    def _copied(self, memory: Memory, new: Memory, continued: Continued) -> Memory:
        """Return a copy with the new chunks, and with room for as many again."""
        end, before = continued.num_after, continued.num_before
        # A state from `reserve` sees more chunks than are complete.
        capacity = max(end, 2 * min(memory.keys.shape[1], end))
        whole, room = self.new_buffers(new, capacity), Room(end, capacity)
        for buffer, old, added in zip(whole, memory, new, strict=True):
            if before is None:
                buffer[:, :end] = _extended(old, added, continued)
            else:  # saves a copy
                buffer[:, :before] = old[:, :before]
                buffer[:, before:end] = added[:, : end - before]
            _ROOMS[buffer.untyped_storage()] = room
        return Memory(*(part[:, :end] for part in whole))

    def reserve(self, memory: Memory, count: int | None, num_chunks: int) -> Memory:
        """Return a memory with room for `num_chunks` chunks of each row, for steps to write.

        It is a copy, unless all rows have `count` chunks (None if they differ) and the buffers have
        enough room. Then this state takes the room, and other states will copy.
        """
        S, room = memory.keys.shape[1], room_of(memory)
        fits = count == S and _may_write(memory, memory)
        if room is not None and fits and room.take(S, num_chunks, room.capacity):
            return whole_buffers(memory)
        whole = self.new_buffers(memory, max(num_chunks, S))
        for buffer, part in zip(whole, memory, strict=True):
            buffer[:, :S] = part
        return whole

    def copy_rows(self, memory: Memory, rows: Tensor | None) -> Memory:
        """Copy some rows (N,), or all, with the same room, into new buffers.

        All rows of a memory that `append` made are not copied: nobody overwrites its chunks, and
        only one of its states can append in place.
        """
        room, S = room_of(memory), memory.keys.shape[1]
        if rows is None and room is not None and room.capacity > S:
            return memory
        if rows is None:
            rows = torch.arange(len(memory.keys), device=memory.keys.device)
        if torch.is_grad_enabled():
            return Memory(*(part.index_select(0, rows.to(part.device)) for part in memory))
        like = Memory(*(part[:1].expand(len(rows), *part.shape[1:]) for part in memory))
        whole = self.new_buffers(like, S)
        for buffer, part in zip(whole, memory, strict=True):
            torch.index_select(part, 0, rows.to(part.device), out=buffer)
        return whole

    @abstractmethod
    def new_buffers(self, like: Memory, capacity: int) -> Memory:
        """Allocate buffers for `capacity` chunks, uninitialized; a UserError if they do not fit."""

    @abstractmethod
    def gather(self, memory: Memory, indices: Tensor) -> Readable:
        """Return the chunks that a segment reads, (B, N, R); waits for a GPU if it `fetches`."""

    @abstractmethod
    def fetch(self, memory: Memory, indices: Tensor, fetched: Fetched) -> Fetched:
        """Return the chunks that the open chunk reads, (B, G, R), to replace `fetched`."""

    @abstractmethod
    def read(self, memory: Memory, fetched: Fetched, indices: Tensor, group: int) -> Readable:
        """As `gather`, for a step and one group of indices (B, G, R); never waits for a GPU."""

    @abstractmethod
    def store_(self, memory: Memory, encoded: Memory, due: Due) -> None:
        """Store the device's part of a chunk (B, 1, ...) in rows where it is due; never waits."""

    @abstractmethod
    def store_rows_(
        self, memory: Memory, fetched: Fetched, indices: Tensor, encoded: Memory, rows: Tensor,
        stored: Tensor,
    ) -> None:  # fmt: skip
        """Store the host's part of a chunk (B, 1, ...), and fetch what the next chunk reads.

        `rows` (n,) are those whose chunk is due; `stored` (B,) counts the chunks of each row.
        """


class Room:
    """Counts the filled chunks in buffers for `capacity` chunks, which several states share.

    Several threads may go on from one state; the lock lets only one of them append in place.
    """

    def __init__(self, filled: int, capacity: int) -> None:
        self.filled, self.capacity = filled, capacity
        self._lock = Lock()

    def take(self, S: int, end: int, filled: int) -> bool:
        """Reserve the room after S chunks; True if the caller, and nobody else, may write there.

        That is so if S chunks are filled and `end` fit; then `filled` chunks count as filled.
        """
        with self._lock:
            if self.filled != S or end > self.capacity:
                return False
            self.filled = filled
        return True

    def close(self, S: int) -> bool:
        """Let nobody write after S chunks from now on; False if somebody may have done so."""
        return self.filled > self.capacity or self.take(S, S, self.capacity + 1)


_ROOMS: WeakKeyDictionary[torch.UntypedStorage, Room] = WeakKeyDictionary()


def room_of(memory: Memory) -> Room | None:
    """Return the `Room` of a memory's buffers; None if it has none or shows other rows of them."""
    room, *others = (_ROOMS.get(part.untyped_storage()) for part in memory)
    if room is None or any(other is not room for other in others):
        return None
    return room if all(_lies_in(part, room.capacity) for part in memory) else None


def whole_buffers(memory: Memory) -> Memory:
    """Return the memory's whole buffers, or the memory itself if it has no room.

    Whole buffers have no gaps, so the kernels need no copies of them.
    """
    room = room_of(memory)
    if room is None:
        return memory
    size = room.capacity
    return Memory(*(x.as_strided((len(x), size, *x.shape[2:]), x.stride()) for x in memory))


def check_room(memory: Memory, num_chunks: int) -> None:
    """Raise a ValueError if a row with `num_chunks` chunks cannot store one more."""
    if num_chunks >= memory.k.shape[1]:
        raise ValueError(
            f"state has room for {memory.k.shape[1]} chunks, and a row has them all: reserve more"
        )


def _close(memory: Memory) -> bool:
    """Let no state append in the memory's buffers from now on; False if one may have appended."""
    if memory.keys.is_inference():  # torch does not save it for a backward
        return True
    rooms = {_ROOMS.get(part.untyped_storage()) for part in memory}
    return all(room is None or room.close(memory.keys.shape[1]) for room in rooms)


def _lies_in(part: Tensor, capacity: int) -> bool:
    """Tell whether each row of the tensor has room for `capacity` chunks in its storage."""
    row = capacity * part.stride(1)
    last = part.storage_offset() + (len(part) - 1) * part.stride(0) + row
    apart = len(part) == 1 or part.stride(0) >= row
    return bool(apart and last * part.itemsize <= part.untyped_storage().nbytes())


def _may_write(memory: Memory, new: Memory) -> bool:
    """Tell whether `new` has the memory's dtypes, and torch allows writes to it here."""
    same = all(old.dtype == added.dtype for old, added in zip(memory, new, strict=True))
    return same and (torch.is_inference_mode_enabled() or not memory.keys.is_inference())


def _brought(new: Tensor, memory: Tensor) -> Tensor:
    """Copy new chunks to the memory's device, on the host into a pinned block; waits for a GPU."""
    if new.device == memory.device:
        return new
    block = torch.empty(new.shape, dtype=new.dtype, device=memory.device, pin_memory=True)
    return block.copy_(new)


def _extended(old: Tensor, new: Tensor, continued: Continued) -> Tensor:
    """Append the completed chunks: (B, S, ...) and (B, N, ...) give (B, `num_after`, ...)."""
    old, new = old.to(new.dtype), new.to(old.device)
    if continued.num_before is not None:
        kept = old[:, : continued.num_before]
        return torch.cat([kept, new[:, : continued.num_after - continued.num_before]], 1)
    S = old.shape[1]
    chunk = torch.arange(continued.num_after, device=old.device)
    before = continued.before.to(old.device)[:, None]
    index = torch.where(chunk < before, chunk, S + chunk - before)
    return take(torch.cat([old, new], 1), index.clamp(max=S + new.shape[1] - 1))
