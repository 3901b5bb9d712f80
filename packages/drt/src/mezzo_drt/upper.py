"""The upper half: groups of layers, each of which retrieves by the input of its first layer."""

from collections.abc import Iterable, Sequence
from typing import cast

import torch
from mezzo_core.nn.attention import KVCache
from mezzo_core.ops.named_tuples import replaced
from torch import Tensor, nn

from mezzo_drt.layer import UpperLayer
from mezzo_drt.memory.chunks import Due, Memory
from mezzo_drt.memory.store import AbstractStore
from mezzo_drt.ops.grouped_cross_attention import Readers, readers_of
from mezzo_drt.places import Places
from mezzo_drt.queries import Queries
from mezzo_drt.retrieval import Reads, after_first
from mezzo_drt.state import DRTState


class UpperLayers(nn.ModuleList):
    """Layers, one after another, in groups; each group retrieves again."""

    def __init__(self, layers: Iterable[UpperLayer], num_groups: int) -> None:
        """Take the layers, and divide them into groups of equal size."""
        super().__init__(layers)
        self._group_size = len(self) // num_groups

    @property
    def layers(self) -> Sequence[UpperLayer]:
        """The layers; torch's ModuleList has no element type."""
        return cast(Sequence[UpperLayer], tuple(self))

    def forward(
        self,
        h: Tensor,
        caches: Sequence[KVCache | None],
        chunks: Memory,
        places: Places,
        queries: Queries,
        store: AbstractStore,
        memory: Memory | None = None,
        state: DRTState | None = None,
    ) -> tuple[Tensor, list[KVCache | None], list[Reads]]:
        """Run over the places of a call.

        Args:
            h: (B, P, C), the output of the lower layers.
            caches: of these layers, before these places.
            chunks: the N chunks of the grid, encoded.
            places: of the call.
            queries: retrieve chunks.
            store: of the memory.
            memory: the chunks that can be read; None: those of the grid.
            state: tells what the first chunk reads; None: nothing.

        Returns:
            (B, P, C), the caches, and for each group what the N chunks, and the one after them,
            read.
        """
        after: list[KVCache | None] = []
        reads: list[Reads] = []
        readers: Readers | None = None
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            if i % self._group_size == 0:
                group, readable = len(reads), chunks if memory is None else memory
                old = None if state is None else state.reads(group)
                asked = (places.landmarks(h), chunks.keys, readable.keys, places.lo, places.hi)
                reads.append(after_first(queries.retrieve(group, *asked), old))
                here = Reads(*(part[:, : places.num_chunks].contiguous() for part in reads[-1]))
                if memory is not None:
                    readable, indices = store.gather(memory, here.indices)
                    here = replaced(here, indices=indices)
                if h.is_cuda and torch.is_grad_enabled():  # for the backward of the kernels
                    readers = readers_of(here.indices, readable.k.shape[1])
            h, new = layer(h, cache, readable.k, readable.v, *here, places, readers)
            after.append(new)
        return h, after, reads

    def step(
        self,
        h: Tensor,
        caches: Sequence[KVCache],
        state: DRTState,
        queries: Queries,
        store: AbstractStore,
        due: Due | None,
        encoded: Memory | None,
    ) -> Tensor:
        """Run one place of every row, (B, 1, C), overwriting the caches.

        In rows where a landmark is due, it retrieves for the next chunk; `encoded` is the chunk
        that ends there.
        """
        found = []
        for i, (layer, cache) in enumerate(zip(self.layers, caches, strict=True)):
            group = i // self._group_size
            if due is not None and encoded is not None and i % self._group_size == 0:
                hi = due.stored[:, None]
                asked = (h, encoded.keys, state.memory.keys, torch.zeros_like(hi), hi)
                found.append(queries.retrieve(group, *asked))
            memory, slots = store.read(state.memory, state.fetched, state.indices, group)
            h = layer.step(h, cache, memory, Reads(slots, state.weights[:, group, None]))
        if due is not None:
            indices, weights = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
            due.put_(state.indices, indices)
            due.put_(state.weights, weights)
        return h
