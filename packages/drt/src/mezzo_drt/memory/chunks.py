"""Named tuples of chunks in memory."""

from typing import NamedTuple

import torch
from torch import Tensor


class Memory(NamedTuple):
    """S encoded chunks.

    Attributes:
        keys: (B, S, C), their keys for retrieval.
        k: (B, S, L, H, D), the keys of their tokens, for all upper layers.
        v: likewise, the values.
    """

    keys: Tensor
    k: Tensor
    v: Tensor


class Fetched(NamedTuple):
    """The chunks that the open chunk reads, on the device; empty where the memory is there too.

    Attributes:
        k: (B, G R, L, H, D), keys, group after group; anything where nothing is read.
        v: likewise, values.
    """

    k: Tensor
    v: Tensor


class Due(NamedTuple):
    """Which rows run a landmark (`here`, (B,) bool).

    `stored` (B,) int64 is the number of chunks that each row has in memory.
    """

    here: Tensor
    stored: Tensor

    def put_(self, old: Tensor, new: Tensor) -> None:
        """Overwrite rows of a state's tensor (B, ...) where they run a landmark."""
        here = self.here.view(-1, *[1] * (old.ndim - 1))
        old.copy_(torch.where(here, new.to(old.dtype), old))

    def store_(self, memory: Tensor, new: Tensor) -> None:
        """Store a chunk (B, 1, ...) of these rows in (B, S, ...), after the chunks they have."""
        rows = torch.arange(len(new), device=new.device)
        slot = self.stored.clamp(max=memory.shape[1] - 1)  # a row without room runs no landmark
        here = self.here.view(-1, *[1] * (new.ndim - 2))
        memory[rows, slot] = torch.where(here, new[:, 0].to(memory.dtype), memory[rows, slot])
