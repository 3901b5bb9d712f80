"""Chunk memory that grows in place: a segment appends behind what the states before it can see.

A state's memory is a view of the first S chunks of buffers with room for more. Several states may
see the same buffers, but only one state can be the last to have appended: the `Room` that they
share says up to which chunk the buffers are filled. A state that sees fewer chunks than that is
not the newest, and copies first.
"""

from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_drt.encoder import Memory
from mezzo_drt.offload import bring
from mezzo_drt.places import Continued
from mezzo_drt.store import Allocate

_LOCK = Lock()
"""Threads may go on from one state: only one takes the room behind it."""


class Room(NamedTuple):
    """What the states that see the same buffers know about them."""

    filled: int
    """Chunks that some state sees; more than the capacity if no state may write any more."""
    capacity: int
    """Chunks for which there is room."""


def make_leaf(batch: int, room: Room | None = None) -> Tensor:
    """Return a (batch, 0) tensor for a state, in the host's memory, whose storage holds the room.

    Only its storage says something, so that the values of a state's tensors never change, and a
    copy of a state's tensors has no room and shares none.
    """
    return torch.tensor(room or [], dtype=torch.int64, device="cpu")[:0].view(batch, 0)


def room_of(leaf: Tensor) -> Room | None:
    """Return what `make_leaf` was given."""
    numbers = _numbers(leaf)
    return None if numbers is None else Room(*numbers.tolist())


def _numbers(leaf: Tensor) -> Tensor | None:
    if leaf.untyped_storage().nbytes() != len(Room._fields) * leaf.itemsize:
        return None
    return leaf.as_strided((len(Room._fields),), (1,), 0)


def buffers(memory: Memory, leaf: Tensor) -> Memory:
    """Return the whole buffers that the memory sees, or the memory itself if it has no room."""
    room = room_of(leaf)
    if room is None or not all(_has_room(part, room) for part in memory):
        return memory
    return Memory(*(_widened(part, room.capacity) for part in memory))


def _take(leaf: Tensor, S: int, end: int, filled: int | None = None) -> bool:
    """Take the room up to chunk `end` behind S chunks, if no other state has taken room there.

    It then counts as filled up to `filled`; None for all of it.
    """
    numbers = _numbers(leaf)
    if numbers is None:
        return False
    with _LOCK:
        room = Room(*numbers.tolist())
        if room.filled != S or end > room.capacity:
            return False
        numbers[0] = room.capacity if filled is None else filled
    return True


def _give_away(leaf: Tensor, S: int) -> bool:
    """Let no state take the room behind S chunks from now on; False if one has taken it."""
    numbers = _numbers(leaf)
    if numbers is None or leaf.is_inference():  # which torch does not save for a backward
        return True
    with _LOCK:
        room = Room(*numbers.tolist())
        if S < room.filled <= room.capacity:
            return False
        numbers[0] = room.capacity + 1
    return True


def _has_room(part: Tensor, room: Room) -> bool:
    """Tell whether the tensor's rows lie in its storage with room behind each."""
    row, offset = room.capacity * part.stride(1), part.storage_offset()
    last = offset + (len(part) - 1) * part.stride(0) + row
    apart = len(part) == 1 or part.stride(0) >= row
    return bool(apart and last * part.itemsize <= part.untyped_storage().nbytes())


def _widened(part: Tensor, num_chunks: int) -> Tensor:
    return part.as_strided((len(part), num_chunks, *part.shape[2:]), part.stride())


def append(
    memory: Memory, leaf: Tensor, new: Memory, continued: Continued, allocate: Allocate | None
) -> tuple[Memory, Tensor]:
    """Append the chunks that a call completes, and return the memory and its leaf.

    Where the memory must be copied, it gets twice the room, so that segment after segment copies
    little. It is copied if it has no room, if another state has appended to the same buffers, if
    rows write at different chunks, in another dtype, or if gradients are on: then nothing may be
    overwritten, and there is no room. A call with gradients that completes no chunk gives the room
    away, or copies if another state has taken it.

    Args:
        memory: of the state, which sees the same as before.
        leaf: of the state.
        new: of the N chunks of the call's grid.
        continued: the call's places.
        allocate: makes buffers of keys and values; None for the device.
    """
    S, end = memory.keys.shape[1], continued.num_after
    if not continued.num_done:
        # The kernels' backward needs the buffers as they are.
        if torch.is_grad_enabled() and allocate is None and not _give_away(leaf, S):
            return Memory(*(part.clone() for part in memory)), make_leaf(len(leaf))
        return memory, leaf
    if torch.is_grad_enabled():
        parts = [
            continued.extend(old, added.to(old.device))
            for old, added in zip(memory, new, strict=True)
        ]
        return Memory(*parts), make_leaf(len(leaf))
    if allocate is not None:
        new = bring(new)
    whole = buffers(memory, leaf)
    fits = whole is not memory and continued.writes_at == S and _may_write(memory, new)
    if fits and _take(leaf, S, end, end):
        for part, added in zip(whole, new, strict=True):
            part[:, S:end] = added[:, : end - S]
    else:
        capacity = max(end, 2 * min(S, end))  # a state that steps sees more than it has
        whole = _new_buffers(new, capacity, allocate)
        for buffer, old, added in zip(whole, memory, new, strict=True):
            _copy(buffer, old, added, continued)
        leaf = make_leaf(len(leaf), Room(end, capacity))
    return Memory(*(part[:, :end] for part in whole)), leaf


def claim(
    memory: Memory, leaf: Tensor, count: int | None, num_chunks: int, allocate: Allocate | None
) -> Memory:
    """Return a memory with room for `num_chunks` chunks, which `before_step` may write.

    Nothing is copied if the buffers have that much room behind what the states before can see, and
    all rows have as many chunks. Then the room is given away: a state that appends will copy.

    Args:
        memory: of a state.
        leaf: of the state.
        count: the complete chunks of all rows; None if they differ.
        num_chunks: for which there shall be room.
        allocate: as in `append`.
    """
    S, whole = memory.keys.shape[1], buffers(memory, leaf)
    fits = whole is not memory and count == S and _may_write(memory, memory)
    if fits and _take(leaf, S, num_chunks):
        return whole
    whole = _new_buffers(memory, max(num_chunks, S), allocate)
    for buffer, part in zip(whole, memory, strict=True):
        buffer[:, :S] = part
    return whole


def check_room(memory: Memory, num_chunks: int) -> None:
    """Check that a row of so many chunks can store one more.

    Raises:
        ValueError: if it cannot.
    """
    if num_chunks >= memory.k.shape[1]:
        raise ValueError(
            f"state has room for {memory.k.shape[1]} chunks, and a row has them all: reserve more"
        )


def _may_write(memory: Memory, new: Memory) -> bool:
    """Tell whether the memory takes the dtypes of `new`, and writes in place at all."""
    same = all(old.dtype == added.dtype for old, added in zip(memory, new, strict=True))
    return same and (torch.is_inference_mode_enabled() or not memory.keys.is_inference())


def _new_buffers(like: Memory, capacity: int, allocate: Allocate | None) -> Memory:
    def on_device(part: Tensor) -> Tensor:
        return part.new_empty(len(part), capacity, *part.shape[2:])

    if allocate is None:
        return Memory(*(on_device(part) for part in like))
    # Both at once: of memory that is not written yet, a host does not say that it is taken.
    both = allocate((2, len(like.k), capacity, *like.k.shape[2:]), like.k.dtype)
    # Autograd does not let several views of one tensor be written.
    k, v = (part.detach() for part in both)
    return Memory(on_device(like.keys), k, v)


def _copy(buffer: Tensor, old: Tensor, new: Tensor, continued: Continued) -> None:
    """Write what is old, and new behind it, into a buffer."""
    end, before = continued.num_after, continued.num_before
    if before is None:
        buffer[:, :end] = continued.extend(old, new.to(old.device))
    else:  # without a second copy
        buffer[:, :before] = old[:, :before]
        buffer[:, before:end] = new[:, : end - before]
