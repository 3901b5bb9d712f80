"""RAT-Reversed (the paper's appendix C.1): attention inside chunks, a recurrence across them.

The paper gives no equation. These are ours: they are causal, can be computed token by token, and
have both limits. For token l of chunk n, with queries and keys rotated by RoPE, and with e[n] the
value at the end of the chunk:

    a[n,l] = softmax(q[n,l]·k[n,0..l] / sqrt(D)) v[n,0..l]
    h[n,l] = f[n,l] e[n-1] + (1 - f[n,l]) a[n,l]              e[n] = h[n,L-1], e[-1] = 0
    y[n,l] = sigmoid(z[n,l]) h[n,l]

With L >= T this is softmax attention (times 1 - f, as RAT at L = 1). With L = 1 it is the gated
linear RNN.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.attention import attention
from mezzo_core.ops.checks import check_floating, check_number, check_size
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.scan import linear_scan
from mezzo_core.positions import rotate
from torch import Tensor, nn

from mezzo_rat.gate_bias import init_gate_bias
from mezzo_rat.ops.divide import floor_divide
from mezzo_rat.ops.forget_gate import forget_gate
from mezzo_rat.ops.rat_attention.chunks import packed_chunks


@dataclass(frozen=True)
class RATReversedConfig:
    """Softmax attention inside chunks, a gated recurrence across them; q shared by all heads."""

    chunk_size: int = 128
    """L. With 1 the mixer is a linear RNN, with T or more attention."""
    head_dim: int = 64
    gate_rank: int = 64
    """Rank of the output gate's projection."""
    rope_base: float = 10_000.0
    span: int = 64
    """T / L in training. The gates start with memories of up to this many chunks."""

    def build(self, d_model: int) -> "RATReversed":
        """Build the mixer.

        Raises:
            TypeError: if a size is not an int, or `rope_base` not a number; it names the field.
            ValueError: if the widths do not divide, or a number is not positive and finite; it
                names the field.
        """
        return RATReversed(self, d_model)


class RATReversedState(NamedTuple):
    """The decoding state: the open chunk's keys and values, and the end of the chunk before."""

    k: Tensor
    """(B, L, H, D): keys after RoPE; a row that has seen n tokens uses the first n % L."""
    v: Tensor
    """(B, L, H, D): their values."""
    h: Tensor
    """(B, H, D) float32: e of the last closed chunk, zero before the first."""
    lengths: Tensor
    """(B,) int64: the tokens that each row has seen."""


class RATReversed(AbstractMixer):
    """The reversed mixer.

    `in_proj` gives v, g, k of C channels each, the low-rank input of the output gate, and q of D.
    """

    state_type = RATReversedState

    def __init__(self, config: RATReversedConfig, d_model: int) -> None:
        super().__init__()
        D = config.head_dim
        check_size("RATReversed", "d_model", d_model)
        for name in ("chunk_size", "head_dim", "gate_rank", "span"):
            check_size("RATReversed", name, getattr(config, name))
        check_number("RATReversed", "rope_base", config.rope_base, positive=True)
        if D % 2 or d_model % D:
            raise ValueError(
                f"RATReversed: head_dim must be even and divide d_model = {d_model}, got {D}"
            )
        self.config, self.d_model = config, d_model
        self.widths = (d_model, d_model, d_model, config.gate_rank, D)
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.z_proj = Linear(config.gate_rank, d_model, bias=False)
        self.gate_bias = nn.Parameter(torch.empty(d_model))
        self.out_proj = Linear(d_model, d_model, bias=False)
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Start the forget gates so that their memories span the chunks (log u, u ~ U(1, N-1))."""
        init_gate_bias(self.gate_bias, self.config.span)

    def forward(
        self,
        x: Tensor,
        state: RATReversedState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, RATReversedState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        check_floating("RATReversed", "gate_bias", self.gate_bias)
        v, g, k, z, q = self.in_proj(without_padding(x, lengths)).split(self.widths, dim=-1)
        z = self.z_proj(z)
        v, g, k, q = (y.unflatten(-1, (-1, self.config.head_dim)) for y in (v, g, k, q))
        keep, write = forget_gate(g, self.gate_bias.view(v.shape[2:]))
        if cu_seqlens is not None and x.shape[1] > 0:
            h = self._packed(q, k, v, keep, write, cu_seqlens)
        elif state is not None and x.shape[1] > 0:
            added = torch.full_like(state.lengths, x.shape[1]) if lengths is None else lengths
            h, state = self._continued(q, k, v, keep, write, state, added)
        else:
            T = x.shape[1]
            short = (0, 0, 0, 0, 0, -T % self.config.chunk_size)
            q, k, v, keep, write = (F.pad(y, short) for y in (q, k, v, keep, write))
            h, _ = self._chunks(q, self._turned(k), v, keep, write)
            h = h[:, :T]
        return self.out_proj((z.sigmoid() * h.flatten(2)).to(v.dtype)), state

    def _turned(self, x: Tensor) -> Tensor:
        """Apply RoPE by place in the chunk. Inside a chunk this equals RoPE by token."""
        L = self.config.chunk_size
        place = torch.arange(x.shape[1], device=x.device)[None] % L
        return rotate(x, place, self.config.rope_base)

    def _chunks(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor,
        write: Tensor,
        initial: Tensor | None = None,
        borders: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Mix whole chunks, (B, N L, ...). RoPE was applied to k, and not yet to q.

        Args:
            q: (B, N L, 1, D) queries.
            k: (B, N L, H, D) keys.
            v: (B, N L, H, D) values.
            keep: (B, N L, H, D) forget gates.
            write: (B, N L, H, D), 1 - keep.
            initial: (B, H, D), e before the first chunk.
            borders: (S + 1,) borders of sequences among the chunks, from 0 to N.

        Returns:
            h (B, N L, H, D), and e before each chunk and after the last, (B, N + 1, H, D).
        """
        B, length, H, D = v.shape
        L = self.config.chunk_size
        N = length // L
        q, k, v = (y.reshape(B * N, L, H, D) for y in (self._turned(q).expand_as(k), k, v))
        a = attention(q, k, v).out.reshape(B, N, L, H, D)
        keep, write = keep.unflatten(1, (N, L)), write.unflatten(1, (N, L))
        written = write * a
        ends = linear_scan(
            keep[:, :, -1], written[:, :, -1], initial_state=initial, cu_seqlens=borders
        ).out
        before = ends.new_zeros(B, H, D) if initial is None else initial
        ends = torch.cat([before[:, None], ends], dim=1)
        carried = ends[:, :-1]
        if borders is not None:
            first = torch.zeros(N + 1, dtype=torch.bool, device=v.device)
            first = first.index_fill(0, borders, True)[:-1]  # a border may be N
            carried = carried.masked_fill(first[:, None, None], 0.0)
        h = torch.addcmul(written, keep, carried[:, :, None])
        return h.flatten(1, 2), ends

    def _packed(
        self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor, write: Tensor, cu_seqlens: Tensor
    ) -> Tensor:
        """Mix packed sequences, each in chunks of its own: T // L + S chunks for any lengths."""
        T, L = v.shape[1], self.config.chunk_size
        chunks = packed_chunks(T, L, cu_seqlens)
        place = chunks.slot[0] * L + chunks.position[0] % L
        slots = chunks.end.shape[1]
        token = torch.full((slots * L,), T, device=v.device).scatter(
            0, place, torch.arange(T, device=v.device)
        )
        q, k, v, keep, write = (
            F.pad(y, (0, 0, 0, 0, 0, 1)).index_select(1, token) for y in (q, k, v, keep, write)
        )
        num_chunks = floor_divide(cu_seqlens.long().diff() + L - 1, L)
        # The chunks that no sequence needs form one more sequence at the end.
        # A pad by a value would compile anew for each number of slots.
        borders = F.pad(num_chunks.cumsum(0), (1, 0))
        borders = torch.cat([borders, borders.new_full((1,), slots)])
        h, _ = self._chunks(q, self._turned(k), v, keep, write, borders=borders)
        return h.index_select(1, place)

    def _continued(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor,
        write: Tensor,
        state: RATReversedState,
        added: Tensor,
    ) -> tuple[Tensor, RATReversedState]:
        """Mix tokens that continue a state: put them in whole chunks, after the state's tokens."""
        T, L = v.shape[1], self.config.chunk_size
        N = (T + 2 * L - 2) // L
        offset = state.lengths % L
        place = torch.arange(N * L, device=v.device)
        token = (place - offset[:, None]).clamp(0, T - 1)
        q, k, v, keep, write = (_rows(y, token) for y in (q, k, v, keep, write))
        old = (place < offset[:, None])[..., None, None]
        rest = (0, 0, 0, 0, 0, (N - 1) * L)
        k = F.pad(state.k.to(k.dtype), rest).where(old, self._turned(k))
        v = F.pad(state.v.to(v.dtype), rest).where(old, v)
        h, ends = self._chunks(q, k, v, keep, write, initial=state.h)
        h = _rows(h, offset[:, None] + torch.arange(T, device=v.device))
        closed = floor_divide(offset + added, L)
        # A row without an open chunk uses no key of its new state, so any chunk can stand there.
        chunk = closed.clamp(max=N - 1)[:, None] * L + torch.arange(L, device=v.device)
        return h, RATReversedState(
            _rows(k, chunk),
            _rows(v, chunk),
            _rows(ends, closed[:, None])[:, 0],
            state.lengths + added,
        )

    def init_state(self, batch: int) -> RATReversedState:
        """Return the state before the first token."""
        weight, L, D = self.out_proj.weight, self.config.chunk_size, self.config.head_dim
        H, dtype, device = self.d_model // D, weight.dtype, weight.device
        return RATReversedState(
            torch.zeros(batch, L, H, D, dtype=dtype, device=device),
            torch.zeros(batch, L, H, D, dtype=dtype, device=device),
            torch.zeros(batch, H, D, dtype=accumulation_dtype(dtype), device=device),
            torch.zeros(batch, dtype=torch.int64, device=device),
        )

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token, averaged over a sequence of T tokens.

        Projections; attention 4 C a key over the mean number of keys l + 1; h 3 C; output gate C.
        """
        C, L = self.d_model, self.config.chunk_size
        weights = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        full, rest = divmod(num_tokens, L)
        keys = (full * L * (L + 1) / 2 + rest * (rest + 1) / 2) / max(num_tokens, 1)
        return 2 * weights + 4 * C * keys + 4 * C


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Take (B, P, ...) out of x (B, T, ...) by an index (B, P) into each row."""
    rows = torch.arange(x.shape[0], device=x.device)[:, None]
    return x[rows, index]
