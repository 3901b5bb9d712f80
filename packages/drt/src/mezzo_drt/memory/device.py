"""Chunks on the device, where kernels read them by their indices."""

from torch import Tensor

from mezzo_drt.memory.chunks import Due, Fetched, Memory
from mezzo_drt.memory.store import AbstractStore, Readable, whole_buffers


class DeviceStore(AbstractStore):
    """Keeps chunks on the device, and fetches nothing."""

    fetches = False

    def new_buffers(self, like: Memory, capacity: int) -> Memory:
        """Allocate buffers on the device."""
        return Memory(*(x.new_empty(len(x), capacity, *x.shape[2:]) for x in like))

    def gather(self, memory: Memory, indices: Tensor) -> Readable:
        """Return whole buffers, and the same indices."""
        return whole_buffers(memory), indices

    def fetch(self, memory: Memory, indices: Tensor, fetched: Fetched) -> Fetched:
        """Return `fetched`, which is empty."""
        return fetched

    def read(self, memory: Memory, fetched: Fetched, indices: Tensor, group: int) -> Readable:
        """Return the memory, and the group's indices."""
        return memory, indices[:, group, None]

    def store_(self, memory: Memory, encoded: Memory, due: Due) -> None:
        """Store all of the chunk."""
        for old, new in zip(memory, encoded, strict=True):
            due.store_(old, new)

    def store_rows_(self, *unused: object) -> None:
        """Do nothing: the host keeps nothing."""
