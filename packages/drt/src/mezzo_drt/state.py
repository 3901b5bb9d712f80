"""The state of DRT: window caches, the open chunk, and the memory of complete chunks."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import torch
from mezzo_core.nn.attention import KVCache, check_alike, check_cache
from mezzo_core.nn.contract import AbstractSequenceModule
from mezzo_core.nn.state import reset_rows, select_rows
from mezzo_core.ops.checks import is_read
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor
from torch.utils._pytree import tree_map

from mezzo_drt.memory.chunks import Fetched, Memory
from mezzo_drt.memory.disk import check_process
from mezzo_drt.memory.store import AbstractStore
from mezzo_drt.places import Continued, take
from mezzo_drt.retrieval import Reads


class DRTState(NamedTuple):
    """State of `DRT`.

    Attributes:
        caches: the states of the layers, the lower ones first; the `lengths` of windows count
            places.
        memory: S complete chunks. In a row with fewer, the others hold anything.
        lower: (B, L + 1, C), the lower layers' outputs at the places of the open chunk; later
            places hold anything.
        indices: (B, G, R) int64, the chunks that the open chunk reads in each group; -1 for none.
        weights: (B, G, R) float32 (float64 for float64), their weights.
        wait: (B,) int64 in the host's memory: for this number of steps no landmark is due.
        fetched: the chunks that the open chunk reads, if the memory's keys and values are on the
            host.
    """

    caches: tuple[Any, ...]
    memory: Memory
    lower: Tensor
    indices: Tensor
    weights: Tensor
    wait: Tensor
    fetched: Fetched

    # No property: torch 2.8 does not trace one of a named tuple.
    def num_places(self) -> Tensor:
        """Return (B,), the places of each row so far."""
        return cast(Tensor, self.caches[-1].lengths)

    def reads(self, group: int) -> Reads:
        """Return what the open chunk reads in a group, (B, 1, R)."""
        return Reads(self.indices[:, group, None], self.weights[:, group, None])

    def with_open_chunk(self, chunks: Tensor) -> Tensor:
        """Fill the open chunk's earlier places into the first of the call's chunks.

        (B, N, L + 1, C) to the same.
        """
        M = chunks.shape[2]
        is_old = torch.arange(M, device=chunks.device) < (self.num_places() % M)[:, None]
        first = torch.where(is_old[..., None], self.lower.to(chunks.dtype), chunks[:, 0])
        return torch.cat([first[:, None], chunks[:, 1:]], 1)


def emptied(cache: KVCache) -> KVCache:
    """Return the cache before a first token."""
    return KVCache(cache.k[:, :0], cache.v[:, :0], torch.zeros_like(cache.lengths))


def moved_on(cache: KVCache, count: int) -> KVCache:
    """Return the cache of a full window as if it stood `count` places later."""
    shift = count % cache.k.shape[1]  # a place's slot is its remainder
    return KVCache(cache.k.roll(shift, 1), cache.v.roll(shift, 1), cache.lengths + count)


def next_state(
    caches: tuple[Any, ...],
    chunks: Tensor,
    memory: Memory,
    fetched: Fetched,
    reads: Sequence[Reads],
    continued: Continued,
    first: int,
) -> DRTState:
    """Return the state after a call; its open chunk is chunk `done` of the call's grid.

    `reads` begins with chunk `first` of the grid.
    """
    done = continued.done[:, None]
    lower = take(chunks, done.clamp(max=chunks.shape[1] - 1))
    indices, weights = (
        torch.cat([take(part, done - first) for part in parts], 1)
        for parts in zip(*reads, strict=True)
    )
    wait = torch.zeros(len(lower), dtype=torch.int64, device="cpu")
    return DRTState(caches, memory, lower[:, 0], indices, weights, wait, fetched)


def initial_state(
    batch: int, caches: tuple[Any, ...], store: AbstractStore, like: Tensor,
    chunk: tuple[int, int, int], reads: tuple[int, int],
) -> DRTState:  # fmt: skip
    """Return the state before the first token: chunks are (L, H, D), G groups read R of them."""
    width = chunk[1] * chunk[2]

    def zeros(*sizes: int, dtype: torch.dtype = like.dtype) -> Tensor:
        # Not `like.new_zeros`: if `like` is sharded, the result would be too, but rows are not.
        return torch.zeros(batch, *sizes, dtype=dtype, device=like.device)

    tokens = zeros(math.prod(reads) if store.fetches else 0, *chunk)
    return DRTState(
        caches,
        store.new_buffers(Memory(zeros(0, width), tokens, tokens), 0),
        zeros(chunk[0] + 1, width),
        zeros(*reads, dtype=torch.int64) - 1,
        zeros(*reads, dtype=accumulation_dtype(like.dtype)),
        torch.zeros(batch, dtype=torch.int64, device="cpu"),
        Fetched(tokens, tokens.clone()),
    )


def check_state(state: DRTState, first_window: int, chunk_size: int, window_size: int) -> None:
    """Check that the parts of a state belong together; values are read on a CPU only.

    The caches from `first_window` on are those of window attention.

    Raises:
        UserError: if its chunks are in files of the process that forked this one.
        ValueError: if the layers' caches differ in their places, or if a row has more complete
            chunks than its memory, or reads any other chunk.
    """
    check_process(state.memory.k)
    windows: tuple[KVCache, ...] = state.caches[first_window:]
    check_alike(windows, "state.caches")
    check_cache(windows[0], window_size)
    if not is_read(state.num_places()):
        return
    stored, S = state.num_places() // (chunk_size + 1), state.memory.keys.shape[1]
    if (stored > S).any():
        raise ValueError(
            f"state.memory must have all complete chunks, {int(stored.max())} of a row, got {S}"
        )
    beyond = (state.indices < -1) | (state.indices >= stored[:, None, None])
    if beyond.any():
        row = int(beyond.nonzero()[0, 0])
        raise ValueError(
            f"state.indices must be from -1 to {int(stored[row]) - 1}, the last complete chunk "
            f"of row {row}, got {state.indices[row].tolist()}"
        )


def overwritten(layers: Sequence[AbstractSequenceModule]) -> tuple[bool, ...]:
    """Tell of each tensor whether a token overwrites it: all are but the memory of chunks."""
    caches = [on for layer in layers for on in layer.overwritten()]
    return (*caches, *(False,) * len(Memory._fields), *(True,) * 6)


def copied(state: DRTState, rows: Tensor | None, store: AbstractStore) -> DRTState:
    """Copy some rows (N,), or all; the store decides whether copies share its memory."""
    parts = (state.caches, *state[2:])
    caches, *rest = tree_map(torch.clone, parts) if rows is None else select_rows(parts, rows)
    return DRTState(caches, store.copy_rows(state.memory, rows), *rest)


def restarted(state: DRTState, rows: Tensor, first: DRTState, store: AbstractStore) -> DRTState:
    """Copy the state, with some rows reset to `first`; their chunks stay, but nobody reads them."""
    parts, starts = ((whole.caches, *whole[2:]) for whole in (state, first))
    caches, *rest = reset_rows(parts, rows, starts)
    return DRTState(caches, store.copy_rows(state.memory, None), *rest)


def reserved(
    state: DRTState, num_tokens: int, layers: Sequence[AbstractSequenceModule], chunk_size: int,
    store: AbstractStore,
) -> DRTState:  # fmt: skip
    """Return a copy with room for `num_tokens` more tokens of every row, for `DRT.step`."""
    L, M = chunk_size, chunk_size + 1
    most = int(state.num_places().max()) if state.num_places().numel() else 0
    seen = most - most // M + num_tokens
    # One place more, because `before_step` runs a landmark for all rows where one has it.
    num_places = seen + seen // L - most + 1
    caches = tuple(
        layer.reserve(cache, num_places) for layer, cache in zip(layers, state.caches, strict=True)
    )
    same = bool((state.num_places() // M == most // M).all())
    memory = store.reserve(state.memory, most // M if same else None, seen // L)
    rest = {name: tree_map(torch.clone, getattr(state, name)) for name in state._fields[2:]}
    return DRTState(caches, memory, **rest)
