"""Where complete chunks are kept: what every store does, and how memory grows in place.

A state's memory is a view of the first S chunks of buffers with room for more. Several states may
see the same buffers. Their `Room`, which all of them find by the buffers' storage, says how many
chunks are filled: only a state that sees all of these is the newest, and may append in place.
Others copy first, and so do copies of a state, since their storage has no room.
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
"""Memory on the device, and the indices in it of the chunks that are read; -1 for none."""


class AbstractStore(ABC):
    """Keeps the complete chunks of states."""

    fetches: ClassVar[bool]
    """Whether `gather` copies what is read. If not, a backward needs the buffers as they are."""

    def append(self, memory: Memory, new: Memory, continued: Continued) -> Memory:
        """Return the memory with the chunks that a call completes, of the N chunks in `new`.

        Without gradients they are written in place where `append_` can. Else the memory is copied,
        and gets twice the room, so that segment after segment copies little. With gradients nothing
        may be overwritten later: the copy has no room, and a call that completes no chunk closes
        the room, or copies if another state has taken it.
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
        """Append in place, behind what the memory sees; None, and nothing done, if it cannot.

        It can if no other state has, all rows write at one chunk, and the dtypes are the same.
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
        """Return a copy that has the new chunks, and room for as many as it has."""
        end, before = continued.num_after, continued.num_before
        # A state that steps sees more than it has.
        capacity = max(end, 2 * min(memory.keys.shape[1], end))
        whole, room = self.new_buffers(new, capacity), Room(end, capacity)
        for buffer, old, added in zip(whole, memory, new, strict=True):
            if before is None:
                buffer[:, :end] = _extended(old, added, continued)
            else:  # without a second copy
                buffer[:, :before] = old[:, :before]
                buffer[:, before:end] = added[:, : end - before]
            _ROOMS[buffer.untyped_storage()] = room
        return Memory(*(part[:, :end] for part in whole))

    def reserve(self, memory: Memory, count: int | None, num_chunks: int) -> Memory:
        """Return a memory with room for `num_chunks` chunks of each row, for steps to write.

        It is a copy, unless all rows have `count` chunks (None if they differ) and the buffers have
        so much room behind them. Then that is taken: a state that appends will copy.
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
        """Return a memory of some rows (N,), or of all, with the same room behind it.

        It lies in new buffers. But all rows of a memory that `append` made are the memory itself:
        nobody overwrites its chunks, and only one of its states can append in place.
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
        """Make buffers for so many chunks, of any values; a UserError if they do not fit."""

    @abstractmethod
    def gather(self, memory: Memory, indices: Tensor) -> Readable:
        """Return what a segment reads, (B, N, R); waits for a GPU if it `fetches`."""

    @abstractmethod
    def fetch(self, memory: Memory, indices: Tensor, fetched: Fetched) -> Fetched:
        """Return what the open chunks read, (B, G, R), for `read`; `fetched` is what they had."""

    @abstractmethod
    def read(self, memory: Memory, fetched: Fetched, indices: Tensor, group: int) -> Readable:
        """Do `gather` for a step, of indices (B, G, R) in a group, and never wait for a GPU."""

    @abstractmethod
    def store_(self, memory: Memory, encoded: Memory, due: Due) -> None:
        """Store what the device keeps of a chunk (B, 1, ...) where it is due; never waits."""

    @abstractmethod
    def store_rows_(
        self, memory: Memory, fetched: Fetched, indices: Tensor, encoded: Memory, rows: Tensor,
        stored: Tensor,
    ) -> None:  # fmt: skip
        """Store what the host keeps of a chunk (B, 1, ...), and fetch what is read after it.

        That is done for rows (n,) of the batch; stored (B,) are the chunks that each row had.
        """


class Room:
    """How far the buffers that several states see are filled, of `capacity` chunks.

    Threads may go on from one state: only one takes the room behind it.
    """

    def __init__(self, filled: int, capacity: int) -> None:
        self.filled, self.capacity = filled, capacity
        self._lock = Lock()

    def take(self, S: int, end: int, filled: int) -> bool:
        """Count as filled if S chunks are and `end` fit: the caller alone may write behind S."""
        with self._lock:
            if self.filled != S or end > self.capacity:
                return False
            self.filled = filled
        return True

    def close(self, S: int) -> bool:
        """Let nobody write behind S chunks from now on; False if somebody may have."""
        return self.filled > self.capacity or self.take(S, S, self.capacity + 1)


_ROOMS: WeakKeyDictionary[torch.UntypedStorage, Room] = WeakKeyDictionary()


def room_of(memory: Memory) -> Room | None:
    """Return the room of the buffers that a memory sees, if it sees all of their chunks' rows."""
    room, *others = (_ROOMS.get(part.untyped_storage()) for part in memory)
    if room is None or any(other is not room for other in others):
        return None
    return room if all(_lies_in(part, room.capacity) for part in memory) else None


def whole_buffers(memory: Memory) -> Memory:
    """Return the whole buffers that the memory sees, or the memory itself if it has no room.

    They lie without gaps, and so the kernels take them as they are.
    """
    room = room_of(memory)
    if room is None:
        return memory
    size = room.capacity
    return Memory(*(x.as_strided((len(x), size, *x.shape[2:]), x.stride()) for x in memory))


def check_room(memory: Memory, num_chunks: int) -> None:
    """Raise a ValueError if a row of so many chunks cannot store one more."""
    if num_chunks >= memory.k.shape[1]:
        raise ValueError(
            f"state has room for {memory.k.shape[1]} chunks, and a row has them all: reserve more"
        )


def _close(memory: Memory) -> bool:
    """Let no state append behind what the memory sees from now on; False if one has appended."""
    if memory.keys.is_inference():  # which torch does not save for a backward
        return True
    rooms = {_ROOMS.get(part.untyped_storage()) for part in memory}
    return all(room is None or room.close(memory.keys.shape[1]) for room in rooms)


def _lies_in(part: Tensor, capacity: int) -> bool:
    """Tell whether the tensor's rows lie in its storage with room for `capacity` chunks each."""
    row = capacity * part.stride(1)
    last = part.storage_offset() + (len(part) - 1) * part.stride(0) + row
    apart = len(part) == 1 or part.stride(0) >= row
    return bool(apart and last * part.itemsize <= part.untyped_storage().nbytes())


def _may_write(memory: Memory, new: Memory) -> bool:
    """Tell whether the memory takes the dtypes of `new`, and writes in place at all."""
    same = all(old.dtype == added.dtype for old, added in zip(memory, new, strict=True))
    return same and (torch.is_inference_mode_enabled() or not memory.keys.is_inference())


def _brought(new: Tensor, memory: Tensor) -> Tensor:
    """Bring new chunks to the memory's device, to the host in a pinned block; waits for a GPU."""
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
