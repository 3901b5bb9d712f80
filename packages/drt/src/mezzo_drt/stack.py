"""DRT as a stack: landmarks, lower layers, chunk encoder, groups of upper layers that retrieve."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractStack, AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.contract import AbstractSequenceModule, Run, run_eagerly
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.state import Rows
from mezzo_core.ops.checks import check_size, is_read
from mezzo_core.ops.named_tuples import replaced
from mezzo_core.ops.padding import last_real, without_padding
from torch import Tensor, nn

from mezzo_drt import state as states
from mezzo_drt.encoder import ChunkEncoder, num_weights
from mezzo_drt.layer import Residual, UpperLayer
from mezzo_drt.lower import LowerLayers
from mezzo_drt.memory.chunks import Due, Memory
from mezzo_drt.memory.device import DeviceStore
from mezzo_drt.memory.disk import in_folder
from mezzo_drt.memory.host import HostStore
from mezzo_drt.memory.store import AbstractStore, check_room
from mezzo_drt.places import continued_places, packed_places, take, whole_places
from mezzo_drt.queries import Queries
from mezzo_drt.state import DRTState
from mezzo_drt.upper import UpperLayers

Retriever = Literal["learned", "random", "fixed"]


@dataclass(frozen=True)
class DRTConfig:
    """Describes a `DRT`.

    Attributes:
        num_layers: even; the lower half is plain.
        num_groups: G groups of upper layers; each retrieves again.
        chunk_size: L, the tokens of a chunk.
        num_retrieved: R, the chunks that a chunk reads.
        window_size: W, the places (tokens and landmarks) that self-attention sees, including its
            own.
        head_dim: D.
        hidden: width of the MLPs; None for 8C/3, rounded up to a multiple of 256.
        norm_eps: epsilon of the norms of the layers and of the encoder's input.
        num_encoder_layers: of the chunk encoder.
        projections: project landmarks before they are compared (Wh, Wl), as in the paper's text.
            False compares the normalized state with the landmark, as in its released code.
        residual: "released": retrieved values reach the residual stream through the MLP only.
            "text": they are added to the stream first.
        softmax1: whether a token may ignore a chunk (softmax off by one).
        retriever: how chunks are chosen. "random" chooses at random, but weighs the chosen chunks
            by learned scores. "fixed" compares the means of chunks' lower outputs, which the
            retrieval does not train.
        gumbel_noise: whether training adds noise to the scores, to explore.
        offload: whether a state keeps complete chunks in the host's memory; same outputs. On a GPU,
            gradients through states then repeat to the bit only in a backward of one thread
            (`torch.autograd.set_multithreading_enabled(False)`).
        lower: mixers of any package for the lower half, one a layer; none for window attention.
    """

    num_layers: int = 12
    num_groups: int = 1
    chunk_size: int = 64
    num_retrieved: int = 8
    window_size: int = 512
    head_dim: int = 64
    hidden: int | None = None
    norm_eps: float = 1e-5
    num_encoder_layers: int = 2
    projections: bool = True
    residual: Residual = "released"
    softmax1: bool = True
    retriever: Retriever = "learned"
    gumbel_noise: bool = True
    offload: bool = False
    lower: tuple[MixerConfig, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        sizes = ("num_layers", "num_groups", "chunk_size", "num_retrieved", "window_size")
        for name in (*sizes, "head_dim", "num_encoder_layers"):
            check_size("DRTConfig", name, getattr(self, name))
        if self.num_layers % 2 or (self.num_layers // 2) % self.num_groups:
            raise ValueError(
                "num_layers must be even, and num_groups must divide its half, "
                f"got {self.num_layers} and {self.num_groups}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")
        if not 0 < self.norm_eps <= 100:
            raise ValueError(f"norm_eps must be above 0 and at most 100, got {self.norm_eps}")

    def build(self, d_model: int) -> "DRT":
        """Build the stack, on torch's default device; raises as `DRT` does."""
        return DRT(d_model, self)


class DRT(AbstractStack):
    """Layers of window attention, of which the upper half reads retrieved past chunks (section 3).

    Callers see tokens only: a landmark is inserted after every L of them, and dropped at the end.
    """

    state_type = DRTState

    def __init__(self, d_model: int, config: DRTConfig) -> None:
        """Create the layers; raises as `LowerLayers`, or if head_dim does not divide d_model."""
        super().__init__()
        check_size("DRT", "d_model", d_model)
        self.d_model = d_model
        self.config = config
        D, hidden, eps = config.head_dim, config.hidden, config.norm_eps
        attention = AttentionConfig(D, window_size=config.window_size, rope_base=None, alibi="olmo")
        mlp = MLPConfig("swiglu", hidden)
        half = config.num_layers // 2
        self._store: AbstractStore = HostStore() if config.offload else DeviceStore()
        self.landmark = nn.Embedding(1, d_model)
        self.lower = LowerLayers(d_model, half, config.lower, attention, mlp, eps)
        self._sizes = (self.lower.num_mixers, config.chunk_size, config.window_size)
        learned = "projected" if config.projections else "landmark"
        key = "mean" if config.retriever == "fixed" else learned
        self.encoder = ChunkEncoder(d_model, D, config.num_encoder_layers, hidden, key, eps)
        upper = (
            UpperLayer(d_model, attention, mlp, eps, config.residual, config.softmax1)
            for _ in range(half)
        )
        self.upper = UpperLayers(upper, config.num_groups)
        self.queries = Queries(
            d_model, config.num_groups, config.num_retrieved, eps,
            projections=config.projections, gumbel_noise=config.gumbel_noise,
            is_random=config.retriever == "random", is_fixed=config.retriever == "fixed",
        )  # fmt: skip

    def forward(
        self,
        x: Tensor,
        state: DRTState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, DRTState | None]:
        """Map (B, T, C) to (B, T, C); arguments and results as `AbstractStack.forward` says.

        With a state the call waits for a GPU once, to read where the rows stand.
        """
        return self._run(x, state, cu_seqlens, lengths, last_only=False)

    def prefill(
        self, x: Tensor, state: DRTState, *, lengths: Tensor | None = None
    ) -> tuple[Tensor, DRTState]:
        """Run over a segment, and return only the last outputs; see `AbstractStack.prefill`.

        If all rows stand at the same place of a chunk, the upper layers run over the last places
        only: retrieved chunks come from the lower layers, and the windows of upper layers are
        short.
        """
        y, after = self._run(x, state, None, lengths, last_only=True)
        if y.shape[1] > 1:  # all layers ran over all places
            y = last_real(y, lengths)
        return y, cast(DRTState, after)

    def _run(
        self,
        x: Tensor,
        state: DRTState | None,
        cu_seqlens: Tensor | None,
        lengths: Tensor | None,
        *,
        last_only: bool,
    ) -> tuple[Tensor, DRTState | None]:
        """Do what `forward` does; with `last_only`, it may return only the last outputs."""
        self.check_input(x, state, cu_seqlens, lengths)
        L, continued = self.config.chunk_size, None
        if state is not None:
            states.check_state(state, *self._sizes)
            continued = continued_places(state.num_places(), x.shape[1], lengths, L)
            places = continued.places
        elif cu_seqlens is not None:
            places = packed_places(x.shape[1], L, cu_seqlens)
        else:
            places = whole_places(x.shape[1], L, x.device)
        if x.numel() == 0 or places.num_places == 0:
            return without_padding(x, lengths), state

        half = len(self.lower)
        before = (None,) * self.config.num_layers if state is None else state.caches
        h, caches = self.lower(places.spread(x, self.landmark.weight), before[:half], places)
        chunks = places.to_chunks(h)
        reading = (self.queries, self._store)
        if state is None or continued is None:
            h, _, _ = self.upper(h, before[half:], self._encode(chunks), places, *reading)
            return places.collect(h), None
        chunks = state.with_open_chunk(chunks)
        encoded = self._encode(chunks)
        memory = self._store.append(state.memory, encoded, continued)
        first = continued.first_needed(len(self.upper), self.config.window_size) if last_only else 0
        if not first:
            parts = (h, before[half:], encoded, places, *reading)
            h, upper, reads = self.upper(*parts, memory, state)
            y = places.collect(h)
        else:  # the upper layers begin at this chunk, as if nothing had come before
            places, empty = places.from_chunk(first), map(states.emptied, before[half:])
            encoded = Memory(*(part[:, first:] for part in encoded))
            late = (h[:, -places.num_places :], [*empty], encoded, places, *reading)
            h, upper, reads = self.upper(*late, memory)
            upper = [states.moved_on(cache, continued.place_of(first)) for cache in upper]
            tokens = cast(Tensor, places.tokens)[..., None]
            y = take(h, last_real(tokens, lengths)[..., 0])
        every = (*caches, *upper)
        after = states.next_state(every, chunks, memory, state.fetched, reads, continued, first)
        return y, replaced(after, fetched=self._store.fetch(memory, after.indices, state.fetched))

    def step(self, x: Tensor, state: DRTState) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C); see `AbstractStack.step`."""
        self.check_step(x, state)
        return self._step_place(x, state)[0]

    def check_step(self, x: Tensor, state: DRTState) -> None:
        """Check the arguments of `step`, the room of every layer included."""
        super().check_step(x, state)
        states.check_state(state, *self._sizes)
        L, places = self.config.chunk_size, state.num_places()
        if is_read(places) and (places % (L + 1) == L).any():
            raise ValueError("state has a chunk whose landmark is to come: call before_step first")
        self._check_room(x, state)

    def _check_room(self, x: Tensor, state: DRTState) -> None:
        """Check that each layer has room for a place, before any layer's state changes."""
        for i in range(self.lower.num_mixers + 1):  # the first window stands for all windows
            self.layers()[i].check_step(x, state.caches[i])

    @torch.no_grad()
    def before_step(self, state: DRTState, run: Run = run_eagerly) -> None:
        """Run the landmark of rows whose chunk is complete, store the chunk, and retrieve.

        The call waits for a GPU, to read which rows these are, only in steps in which there may be
        one: the state counts the steps until then. `run` computes the landmark.

        Raises:
            TypeError: if the state is of another kind of module.
            ValueError: if the state has no room for the chunk.
        """
        self.check_kind(state)
        L = self.config.chunk_size
        if (state.wait > 0).all():
            state.wait.sub_(1)
            return
        states.check_state(state, *self._sizes)
        num_places = state.num_places().cpu()
        place, stored = num_places % (L + 1), num_places // (L + 1)
        is_due = place == L
        if is_due.any():
            check_room(state.memory, int(stored[is_due].max()))
            encoded = run(self._run_landmarks, state)
            rows = is_due.nonzero()[:, 0]
            kept = (state.memory, state.fetched, state.indices)
            self._store.store_rows_(*kept, encoded, rows, stored)
        # Each step adds a place to a row's open chunk, and a chunk with L places needs a landmark.
        state.wait.copy_(L - 1 - place.masked_fill(is_due, 0))

    def _run_landmarks(self, state: DRTState) -> Memory:
        """Run the landmark of rows where it is due, without waiting; return the encoded chunks."""
        M = self.config.chunk_size + 1
        due = Due(state.num_places() % M == M - 1, state.num_places() // M)
        x = self.landmark.weight[None].expand(len(due.here), -1, -1)
        self._check_room(x, state)
        kept = self.lower.keep(state.caches)
        _, encoded = self._step_place(x, state, due)
        self.lower.put_back_(state.caches, kept, ~due.here)  # all rows ran it
        return cast(Memory, encoded)

    def _step_place(
        self, x: Tensor, state: DRTState, due: Due | None = None
    ) -> tuple[Tensor, Memory | None]:
        """Run one place of every row, (B, 1, C), overwriting the state.

        With `due`, x are landmarks. In rows where one is due, the device's part of the chunk is
        stored, and the landmark retrieves for the next chunk. `before_step` stores the host's part.
        """
        batch = torch.arange(len(x), device=x.device)
        place = state.num_places() % (self.config.chunk_size + 1)
        h = self.lower.step(x, state.caches[: len(self.lower)])
        state.lower[batch, place] = h[:, 0].to(state.lower.dtype)
        encoded = None if due is None else self._encode(state.lower[:, None].to(h.dtype))
        if due is not None and encoded is not None:
            self._store.store_(state.memory, encoded, due)
        caches = state.caches[len(self.lower) :]
        h = self.upper.step(h, caches, state, self.queries, self._store, due, encoded)
        return h, encoded

    def reserve(self, state: DRTState, num_tokens: int) -> DRTState:
        """Return a copy with room for `num_tokens` more tokens of every row, for `step`."""
        self.check_reserve(state, num_tokens)
        L = self.config.chunk_size
        return states.reserved(state, num_tokens, self.layers(), L, self._store)

    def check_reserve(self, state: DRTState, num_tokens: int) -> None:
        """Check the arguments of `reserve`, and that the parts of the state belong together."""
        super().check_reserve(state, num_tokens)
        states.check_state(state, *self._sizes)

    def copy_rows(self, state: DRTState, rows: Tensor | None) -> DRTState:
        """Copy some rows, or all; copies share the memory of chunks if nobody overwrites it."""
        return states.copied(state, rows, self._store)

    def reset(self, state: DRTState, rows: Rows) -> DRTState:
        """Return a state in which some rows are before their first token."""
        rows = self.check_rows("reset", state, rows)
        return states.restarted(state, rows, self.init_state(1), self._store)

    def overwritten(self) -> tuple[bool, ...]:
        """Tell that all tensors but the memory of chunks are overwritten."""
        return states.overwritten(self.layers())

    def init_state(self, batch: int) -> DRTState:
        """Return the state before the first token."""
        c, C, D = self.config, self.d_model, self.config.head_dim
        sizes = ((c.chunk_size, C // D, D), (c.num_groups, c.num_retrieved))
        caches = tuple(layer.init_state(batch) for layer in self.layers())
        return states.initial_state(batch, caches, self._store, self.landmark.weight, *sizes)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state of one sequence, of which only the complete chunks grow.

        A chunk takes its key for retrieval and, without offload, its keys and values, in the dtype
        of the weights. A state that grows in place may have room for twice the chunks.
        """
        c, C, size = self.config, self.d_model, self.landmark.weight.element_size()
        chunks, num_read = num_tokens // c.chunk_size, c.num_groups * c.num_retrieved
        caches = sum(layer.state_bytes(num_tokens + chunks) for layer in self.layers())
        channels = (c.chunk_size + 1 + chunks) * C
        channels += 2 * (num_read if c.offload else chunks) * c.chunk_size * C
        return caches + channels * size + num_read * (8 + 4)

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the chunks' keys and values if they are offloaded, else 0."""
        L, size = self.config.chunk_size, self.landmark.weight.element_size()
        return 2 * (num_tokens // L) * L * self.d_model * size if self.config.offload else 0

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs per token: all layers at all places, encoder and retrieval.

        The encoder counts for complete chunks only.
        """
        c, L = self.config, self.config.chunk_size
        N = num_tokens // L
        places = num_tokens + N
        total = places * sum(block.flops_per_token(places) for block in self.lower.blocks)
        total += sum(layer.flops(num_tokens, L, c.num_retrieved) for layer in self.upper.layers)
        total += N * (self.encoder.flops_per_chunk(L) + 2 * num_weights(self.queries))
        return (total + c.num_groups * self.d_model * N * (N - 1)) / max(num_tokens, 1)

    def offload_to(self, folder: str | Path | None) -> None:
        """From now on, keep offloaded chunks in files of a folder; None: in the host's memory.

        The files have no names and vanish with their states; a forked process cannot continue from
        such states. Gradients need the host's memory.

        Raises:
            UserError: if the folder is missing, or cannot be written.
            TypeError: if the folder is no path.
            ValueError: if the stack does not offload.
        """
        if not self.config.offload:
            raise ValueError("offload_to needs a stack of DRTConfig(offload=True)")
        self._store = HostStore() if folder is None else HostStore(in_folder(folder))

    def units(self) -> Sequence[nn.Module]:
        """Return the lower layers, the encoder and the upper layers."""
        return (*self.lower, self.encoder, *self.upper)

    def layers(self) -> list[AbstractSequenceModule]:
        """Return the part of each layer that has a state: a lower block, or a window attention."""
        return [*self.lower.blocks, *(layer.attention for layer in self.upper.layers)]

    def _encode(self, chunks: Tensor) -> Memory:
        """Encode chunks (B, N, L + 1, C)."""
        return Memory(*self.encoder(chunks))  # a reentrant checkpoint returns a plain tuple
