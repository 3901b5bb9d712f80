"""What DRT remembers: window caches, the open chunk, and what can be read of complete chunks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from mezzo_core.nn.attention import KVCache, check_alike, check_cache
from mezzo_core.ops.checks import is_read
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor
from torch.utils._pytree import tree_map

from mezzo_drt.encoder import Memory
from mezzo_drt.offload import Fetched
from mezzo_drt.places import Continued, take
from mezzo_drt.retrieval import Reads
from mezzo_drt.room import claim, make_leaf
from mezzo_drt.store import Allocate, check_process

if TYPE_CHECKING:
    from mezzo_drt.stack import DRT


class DRTState(NamedTuple):
    """State of `DRT`.

    Attributes:
        caches: of each layer; their `lengths` count places.
        memory: what can be read of the S complete chunks. A row that has fewer holds anything in
            the others.
        lower: (B, L + 1, C), the lower layers' outputs at the places of the open chunk, with K
            channels more of an outside encoder. Those of places to come hold anything.
        indices: (B, G, R) int64, the chunks that the open chunk reads in each group; -1 for none.
        weights: (B, G, R) float32 (float64 for float64), their weights.
        room: (B, 0) int64 in the host's memory, from `make_leaf`: where the memory may grow.
        wait: (B,) int64 in the host's memory: no landmark is due for so many steps.
        fetched: what the open chunk reads, if the host has the memory's keys and values.
    """

    caches: tuple[KVCache, ...]
    memory: Memory
    lower: Tensor
    indices: Tensor
    weights: Tensor
    room: Tensor
    wait: Tensor
    fetched: Fetched

    @property
    def num_places(self) -> Tensor:
        """(B,), the places of each row so far."""
        return self.caches[0].lengths

    def with_open_chunk(self, chunks: Tensor) -> Tensor:
        """Put the open chunk's earlier places before those of the call, (B, N, L + 1, C)."""
        M = chunks.shape[2]
        is_old = torch.arange(M, device=chunks.device) < (self.num_places % M)[:, None]
        first = torch.where(is_old[..., None], self.lower.to(chunks.dtype), chunks[:, 0])
        return torch.cat([first[:, None], chunks[:, 1:]], 1)


class Due(NamedTuple):
    """Which rows run a landmark.

    Attributes:
        here: (B,) bool, whether the row does.
        stored: (B,) int64, how many chunks the row has in memory.
    """

    here: Tensor
    stored: Tensor

    def put_(self, old: Tensor, new: Tensor) -> None:
        """Overwrite rows of a state's tensor (B, ...) where they run a landmark."""
        here = self.here.view(-1, *[1] * (old.ndim - 1))
        old.copy_(torch.where(here, new.to(old.dtype), old))

    def store_(self, memory: Tensor, new: Tensor) -> None:
        """Store the chunk, (B, ...), of rows that run a landmark behind those in (B, S, ...)."""
        rows = torch.arange(len(new), device=new.device)
        slot = self.stored.clamp(max=memory.shape[1] - 1)  # of a row that is full and runs none
        here = self.here.view(-1, *[1] * (new.ndim - 1))
        memory[rows, slot] = torch.where(here, new.to(memory.dtype), memory[rows, slot])


def next_state(
    caches: tuple[KVCache, ...],
    chunks: Tensor,
    memory: Memory,
    room: Tensor,
    fetched: Fetched,
    reads: Sequence[Reads],
    continued: Continued,
) -> DRTState:
    """Return the state after a call, which begins in chunk `done` of the call's grid."""
    done = continued.done[:, None]
    lower = take(chunks, done.clamp(max=chunks.shape[1] - 1))
    indices, weights = (
        torch.cat([take(part, done) for part in parts], 1) for parts in zip(*reads, strict=True)
    )
    wait = torch.zeros(len(lower), dtype=torch.int64, device="cpu")
    return DRTState(caches, memory, lower[:, 0], indices, weights, room, wait, fetched)


def initial_state(stack: "DRT", batch: int) -> DRTState:
    """Return the state before the first token."""
    c, like = stack.config, stack.landmark.weight
    C, L, D = stack.d_model, c.chunk_size, c.head_dim
    K = 0 if stack.outside is None else stack.outside.width

    def zeros(*sizes: int, dtype: torch.dtype = like.dtype) -> Tensor:
        # Not by `new_zeros`: a sharded weight's are sharded, but a process has its own rows.
        return torch.zeros(*sizes, dtype=dtype, device=like.device)

    tokens = zeros(batch, 0, L, C // D, D)
    num_fetched = c.num_groups * c.num_retrieved if c.offload else 0
    fetched = zeros(batch, num_fetched, L, C // D, D)
    if c.offload:
        tokens = tokens.cpu()
    return DRTState(
        tuple(layer.init_state(batch) for layer in stack.attentions()),
        Memory(zeros(batch, 0, K or C), tokens, tokens.clone()),
        zeros(batch, L + 1, C + K),
        torch.full((batch, c.num_groups, c.num_retrieved), -1, device=like.device),
        zeros(batch, c.num_groups, c.num_retrieved, dtype=accumulation_dtype(like.dtype)),
        make_leaf(batch),
        torch.zeros(batch, dtype=torch.int64, device="cpu"),
        Fetched(fetched, fetched.clone()),
    )


def check_state(stack: "DRT", state: DRTState) -> None:
    """Check that the parts of a state belong together; values are read on a CPU only.

    Raises:
        UserError: if its chunks are in files of the process that forked this one.
        ValueError: if the layers' caches do not hold the same places, or if a row has more complete
            chunks than its memory, or reads others than these.
    """
    check_process(state.memory.k)
    check_alike(state.caches, "state.caches")
    check_cache(state.caches[0], stack.config.window_size)
    if not is_read(state.num_places):
        return
    stored, S = state.num_places // (stack.config.chunk_size + 1), state.memory.keys.shape[1]
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


def reserved(stack: "DRT", state: DRTState, num_tokens: int, allocate: Allocate | None) -> DRTState:
    """Return a copy with room for `num_tokens` more tokens of every row, for `DRT.step`."""
    stack.check_reserve(state, num_tokens)
    check_state(stack, state)
    L = stack.config.chunk_size
    M = L + 1
    most = int(state.num_places.max()) if state.num_places.numel() else 0
    seen = most - most // M + num_tokens
    # One place more, because `before_step` runs a landmark for all rows where one has it.
    num_places = seen + seen // L - most + 1
    caches = tuple(
        layer.reserve(cache, num_places)
        for layer, cache in zip(stack.attentions(), state.caches, strict=True)
    )
    same = bool((state.num_places // M == most // M).all())
    memory = claim(state.memory, state.room, most // M if same else None, seen // L, allocate)
    # What `room` says is lost in a clone: the room now belongs to the steps.
    rest = {name: tree_map(torch.clone, getattr(state, name)) for name in state._fields[2:]}
    return DRTState(caches, memory, **rest)
