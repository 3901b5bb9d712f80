"""Landmark attention as a stack: it inserts a landmark after every L tokens, and drops it again.

A baseline of DRT's paper. It is trained on rows so short that tokens see all of their past. In
longer rows each token picks chunks, in every layer and head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractStack, MLPConfig
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.checks import can_look, check_number, check_size
from mezzo_core.ops.padding import without_padding
from mezzo_core.positions import rotate
from torch import Tensor, nn

from mezzo_drt.baselines.landmark.attention import Places, Reach, landmark_attention
from mezzo_drt.baselines.landmark.offload import Held, attend_, brought, nearest, store_, stored
from mezzo_drt.baselines.landmark.state import (
    LandmarkState,
    Near,
    check_chunks,
    grown,
    initial_state,
)
from mezzo_drt.places import packed_chunks


@dataclass(frozen=True)
class LandmarkConfig:
    """Describes a `LandmarkStack`.

    The defaults see 768 tokens: eight chunks of 64 that are near, and four that are retrieved.

    When chunks are chosen, a landmark's logit loses `PREFERENCE` = 1e-4 for each chunk of distance
    (ours, so that rounding does not decide between equal logits). With chunks of 64 tokens this is
    at most 0.1 in 64K tokens, but 26 in 16M tokens, where near chunks then win over better ones.

    Attributes:
        num_layers: Y.
        head_dim: D, even.
        chunk_size: L.
        local_chunks: chunks that a token sees before its own.
        retrieved_chunks: R, chunks before these that it picks in each layer and head.
        mlp: of each layer.
        rope_base: base of RoPE.
        norm_eps: epsilon of all norms.
        offload: whether a state keeps the chunks in the host's memory; same outputs. A step waits
            for the GPU in each layer, to fetch the chunks that it picks. On a GPU, gradients
            through states then repeat to the bit only in a backward of one thread
            (`torch.autograd.set_multithreading_enabled(False)`).
    """

    num_layers: int = 12
    head_dim: int = 64
    chunk_size: int = 64
    local_chunks: int = 7
    retrieved_chunks: int = 4
    mlp: MLPConfig = field(default_factory=lambda: MLPConfig("swiglu"))
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    offload: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("num_layers", "head_dim", "chunk_size", "retrieved_chunks"):
            check_size("LandmarkConfig", name, getattr(self, name))
        check_size("LandmarkConfig", "local_chunks", self.local_chunks, 0)
        for name in ("rope_base", "norm_eps"):
            check_number("LandmarkConfig", name, getattr(self, name), positive=True)
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even for RoPE, got {self.head_dim}")

    def build(self, d_model: int) -> "LandmarkStack":
        """Build the stack, on torch's default device; a ValueError if head_dim does not divide."""
        return LandmarkStack(d_model, self)


class LandmarkLayer(nn.Module):
    """`x + attention(norm x)`, then `x + mlp(norm x)`, of tokens and landmarks alike."""

    def __init__(self, d_model: int, config: LandmarkConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.reach = Reach(config.local_chunks, config.retrieved_chunks, config.rope_base)
        self.attention_norm = nn.RMSNorm(d_model, eps=config.norm_eps)
        self.wq, self.wk, self.wv, self.wo = (
            Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.mlp_norm = nn.RMSNorm(d_model, eps=config.norm_eps)
        self.mlp = config.mlp.build(d_model)

    def forward(
        self, x: Tensor, k_grid: Tensor, v_grid: Tensor, places: Places, in_place: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run places (B, X, C); return them, and the grids (B, N, P, H, D) with their keys, values.

        The grids are overwritten if `in_place`. That is an argument because reentrant checkpoints
        turn gradients off, but run the layer again on the same grids.
        """
        q, k, v = self._project(x, places)
        pairs = (k_grid, k), (v_grid, v)
        k_grid, v_grid = (_write(grid, new, places, in_place) for grid, new in pairs)
        out = landmark_attention(q, k_grid.to(q.dtype), v_grid.to(q.dtype), places, self.reach)
        return self._add(x, out), k_grid, v_grid

    def step(self, x: Tensor, held: Held, places: Places) -> Tensor:
        """Run the newest places (B, X, C) over offloaded chunks; waits for a GPU."""
        return self._add(x, attend_(*self._project(x, places), held, places, self.reach))

    def _project(self, x: Tensor, places: Places) -> tuple[Tensor, Tensor, Tensor]:
        h = self.attention_norm(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        return q, rotate(k, places.offset, self.reach.rope_base), v

    def _add(self, x: Tensor, out: Tensor) -> Tensor:
        x = x + self.wo(out.flatten(2))
        return x + self.mlp(self.mlp_norm(x))


class LandmarkStack(AbstractStack):
    """Layers of landmark attention, with their landmarks. `landmark` is their embedding, (C,)."""

    state_type = LandmarkState

    def __init__(self, d_model: int, config: LandmarkConfig) -> None:
        """Create the layers.

        Raises:
            ValueError: if `head_dim` does not divide `d_model`.
        """
        super().__init__()
        check_size("LandmarkStack", "d_model", d_model)
        if d_model % config.head_dim:
            raise ValueError(f"head_dim must divide d_model, got {config.head_dim} and {d_model}")
        self.d_model, self.config = d_model, config
        self.landmark = nn.Parameter(torch.empty(d_model))
        self.layers = cast(
            Sequence[LandmarkLayer],
            nn.ModuleList(LandmarkLayer(d_model, config) for _ in range(config.num_layers)),
        )
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Draw the landmark like a row of the embedding."""
        nn.init.normal_(self.landmark, std=0.02)

    def forward(
        self,
        x: Tensor,
        state: LandmarkState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, LandmarkState | None]:
        """Map (B, T, C) to (B, T, C); arguments and results as `AbstractStack.forward` says.

        With a state it waits for the GPU, to read how long the rows are. A NaN in a packed sequence
        changes no other; it can reach their gradients on a GPU and in compiled graphs, which may
        not wait to read the borders.
        """
        self.check_input(x, state, cu_seqlens, lengths)
        B, T = x.shape[:2]
        if T == 0:
            return x, state
        x = without_padding(x, lengths)
        L = self.config.chunk_size
        if cu_seqlens is not None and can_look(x, cu_seqlens):
            # One by one, so that a NaN in one sequence cannot reach the gradients of others.
            sequences = x.split(cu_seqlens.diff().tolist(), 1)
            return torch.cat([self(part)[0] for part in sequences if part.shape[1]], 1), None
        if cu_seqlens is not None:
            places, num_chunks = self._packed_places(cu_seqlens, T)
            return self._run(x, *self._room(B, num_chunks), places)[0], None
        if state is None:
            seen = torch.zeros(B, dtype=torch.int64, device=x.device)
            return self._run(x, *self._room(B, -(-T // L)), self._places(seen, T))[0], None
        after = state.seen + (T if lengths is None else lengths)
        room, places = grown(state, T, L), self._places(state.seen, T)
        if self.config.offload:
            return self._run_offloaded(x, room, after, places)
        y, k, v = self._run(x, room.k, room.v, places)
        return y, LandmarkState(k, v, after, room.near)

    def step(self, x: Tensor, state: LandmarkState) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place.

        It waits for a GPU if chunks are offloaded.
        """
        self.check_step(x, state)
        num_chunks, offload = check_chunks(state), self.config.offload
        seen = state.seen.cpu() if offload else state.seen
        if not seen.is_cuda and (seen // self.config.chunk_size >= num_chunks).any():
            raise ValueError(f"state has room for {num_chunks} chunks: reserve more")
        places = self._places(state.seen, 1)
        if offload:
            y = self._step_offloaded(x, state, seen, places)
        else:
            y, *_ = self._run(x, state.k, state.v, places)
        state.seen.add_(1)
        return y

    def step_waits(self) -> bool:
        """Tell that a step waits for the GPU if chunks are offloaded."""
        return self.config.offload

    def reserve(self, state: LandmarkState, num_tokens: int) -> LandmarkState:
        """Return a copy of the state with room for `num_tokens` more tokens of every row."""
        self.check_reserve(state, num_tokens)
        return grown(state, num_tokens, self.config.chunk_size)

    def _run(
        self, x: Tensor, k: Tensor, v: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run tokens, followed by landmarks; the grids are (B, Y, N, P, H, D)."""
        T = x.shape[1]
        x = self._with_landmarks(x, places)
        grids, in_place = [], not torch.is_grad_enabled()
        for layer, *its_grids in zip(self.layers, k.unbind(1), v.unbind(1), strict=True):
            x, *its_grids = layer(x, *its_grids, places, in_place)
            grids.append(its_grids)
        if in_place:
            return x[:, :T], k, v
        k, v = (torch.stack(grid, 1) for grid in zip(*grids, strict=True))
        return x[:, :T], k, v

    def _run_offloaded(
        self, x: Tensor, state: LandmarkState, after: Tensor, places: Places
    ) -> tuple[Tensor, LandmarkState]:
        """Run a segment, with the chunks of one layer at a time on the device.

        Without gradients the state, which has room for the segment, is overwritten.
        """
        T, L, W = x.shape[1], self.config.chunk_size, self.config.local_chunks + 1
        first = min(state.seen.tolist(), default=0) // L  # no chunk before it changes
        x = self._with_landmarks(x, places)
        host, near = [state.k, state.v], []
        for y, layer in enumerate(self.layers):
            pairs = zip(host, state.near[1:], strict=True)
            grids = [brought(chunks[:, y], old[:, y], state.seen) for chunks, old in pairs]
            x, *grids = layer(x, *grids, places, not torch.is_grad_enabled())
            host = [stored(old, y, grid, first) for old, grid in zip(host, grids, strict=True)]
            near.append((grids[0][:, :, -1], *(nearest(grid, after, W) for grid in grids)))
        parts = (torch.stack(part, 1) for part in zip(*near, strict=True))
        return x[:, :T], LandmarkState(host[0], host[1], after, Near(*parts))

    def _step_offloaded(
        self, x: Tensor, state: LandmarkState, seen: Tensor, places: Places
    ) -> Tensor:
        """Run a token of every row, and a landmark only where a row completes its chunk.

        `seen` is on the host.
        """
        L = self.config.chunk_size
        rows = (seen % L == L - 1).nonzero()[:, 0]
        if not len(rows):
            places = Places(*(part[:, :1] for part in places))
        x = self._with_landmarks(x, places)
        for y, layer in enumerate(self.layers):
            held = Held(state.k[:, y], state.v[:, y], Near(*(part[:, y] for part in state.near)))
            x = layer.step(x, held, places)
        if len(rows):
            for chunks, near in zip(state[:2], state.near[1:], strict=True):
                store_(chunks, near, rows, seen[rows] // L)
        return x[:, :1]

    def _with_landmarks(self, x: Tensor, places: Places) -> Tensor:
        """Append landmarks to the tokens (B, T, C), until there is one vector for each place."""
        count = places.chunk.shape[1] - x.shape[1]
        return torch.cat([x, self.landmark.to(x.dtype).expand(x.shape[0], count, -1)], 1)

    def _places(self, seen: Tensor, num_tokens: int) -> Places:
        """Return the places of tokens that go on from `seen` (B,), and of the landmarks among them.

        There is a landmark for each chunk that these tokens can complete. If they do not complete
        it, nothing sees the landmark before it is computed again.
        """
        L = self.config.chunk_size
        device = seen.device
        tokens = seen[:, None] + torch.arange(num_tokens, device=device)
        chunks = seen[:, None] // L + torch.arange(-(-num_tokens // L), device=device)
        chunk = torch.cat([tokens // L, chunks], 1)
        offset = torch.cat([tokens % L, torch.full_like(chunks, L)], 1)
        return Places(chunk, offset, torch.zeros_like(chunk))

    def _packed_places(self, cu_seqlens: Tensor, num_tokens: int) -> tuple[Places, int]:
        """Return the places of packed sequences, which begin new chunks, and the chunk count."""
        L = self.config.chunk_size
        chunks = packed_chunks(num_tokens, L, cu_seqlens)
        num_chunks = num_tokens // L + len(cu_seqlens) - 1  # enough for any borders
        landmarks = torch.arange(num_chunks, device=cu_seqlens.device)
        chunk = torch.cat([chunks.chunk, landmarks])
        offset = torch.cat([chunks.offset, torch.full_like(landmarks, L)])
        return Places(chunk[None], offset[None], chunks.first(chunk)[None]), num_chunks

    def _room(self, batch: int, num_chunks: int) -> tuple[Tensor, Tensor]:
        """Return empty grids for keys and values."""
        c = self.config
        shape = (c.num_layers, num_chunks, c.chunk_size + 1, self.d_model // c.head_dim, c.head_dim)
        # Not `w.new_zeros`: if `w` is sharded, the result would be too, but rows are not.
        w = self.landmark
        k = torch.zeros(batch, *shape, dtype=w.dtype, device=w.device)
        return k, torch.zeros_like(k)

    def init_state(self, batch: int) -> LandmarkState:
        """Return the state before the first token."""
        c = self.config
        chunk = (c.chunk_size + 1, self.d_model // c.head_dim, c.head_dim)
        sizes = (c.num_layers, c.local_chunks + 1, chunk)
        return initial_state(batch, self.landmark, *sizes, offload=c.offload)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values of one sequence: whole chunks, with landmarks.

        With offload, only the near chunks and the landmarks' keys count.
        """
        if not self.config.offload:
            return self._bytes_of_chunks(num_tokens)
        c = self.config
        near = self._bytes_of_chunks((c.local_chunks + 1) * c.chunk_size)
        key = c.num_layers * self.d_model * self.landmark.element_size()
        return near + -(-num_tokens // c.chunk_size) * key

    def host_state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values if they are offloaded, else 0."""
        return self._bytes_of_chunks(num_tokens) if self.config.offload else 0

    def _bytes_of_chunks(self, num_tokens: int) -> int:
        """Return the bytes of the keys and values of whole chunks, with landmarks."""
        L = self.config.chunk_size
        places = -(-num_tokens // L) * (L + 1)
        width = 2 * self.config.num_layers * self.d_model
        return places * width * self.landmark.element_size()

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the FLOPs per token: 2 for each weight, 4 C for each place that it sees.

        Choosing chunks costs 2 C for each landmark looked at. Each token also counts 1 / L of a
        landmark; norms do not count.
        """
        c = self.config
        matrices = [part for part in self.modules() if isinstance(part, nn.Linear)]
        weights = sum(matrix.weight.numel() for matrix in matrices)
        most = (c.local_chunks + c.retrieved_chunks + 1) * c.chunk_size
        window = min(most, num_tokens)
        keys = window * (window + 1) / 2 + (num_tokens - window) * window
        seen = keys / max(num_tokens, 1) * (1 + 1 / c.chunk_size)
        looked_at = max(num_tokens - most, 0) / 2 / c.chunk_size
        attention = c.num_layers * self.d_model * (4 * seen + 2 * looked_at)
        return (2 * weights + attention) * (1 + 1 / c.chunk_size)

    def units(self) -> Sequence[nn.Module]:
        """Return the layers."""
        return tuple(self.layers)


def _write(grid: Tensor, new: Tensor, places: Places, in_place: bool) -> Tensor:
    """Write (B, X, H, D) to their places in a grid (B, N, P, H, D)."""
    N, P = grid.shape[1:3]
    slot = (places.chunk * P + places.offset).clamp(max=N * P - 1)  # a step may be out of room
    slot = slot[..., None, None].expand_as(new)
    flat, new = grid.view(grid.shape[0], N * P, *new.shape[2:]), new.to(grid.dtype)
    if not in_place:
        return flat.scatter(1, slot, new).view_as(grid)
    flat.scatter_(1, slot, new)
    return grid
