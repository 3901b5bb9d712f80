"""The Block-Recurrent Transformer's layer (Hutchins et al. 2022, arXiv 2203.07852), as a mixer.

A row is cut into blocks of L tokens, and each block passes M state vectors, s (M, C), to the next.
The tokens of a block attend to tokens in a sliding window, and to the states of the previous block.
The states attend to themselves and to the block's tokens, and a gate makes the next block's states:

    y = Wy [ attention(q_e; K_e, V_e), attention(q_es; K_s, V_s) ]      for the tokens (vertical)
    h = Wh [ attention(q_s; K_s, V_s), attention(q_se; K_e, V_e) ]      for the states (horizontal)
    s' = g s + (1 - g) Wz h,  g = sigmoid(b)              "fixed";  or
    s' = sigmoid(Wf h + bf + 1) s + sigmoid(Wi h + bi - 1) tanh(Wz h + bz)            "lstm"

Both directions read the same keys and values, those of tokens and those of states. Before the
states are projected, they are normalized, and learned vectors are added that tell them apart.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractMixer
from mezzo_core.nn.attention import KVCache, attend_and_keep
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.attention import attention
from mezzo_core.ops.checks import check_size
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import AlibiFormula
from torch import Tensor, nn

from mezzo_drt.places import packed_chunks


class BlockRecurrentState(NamedTuple):
    """State of `BlockRecurrent`.

    Attributes:
        k: (B, W, H, D) keys of the window, token p in slot p % W.
        v: likewise the values.
        s: (B, M, C) states after the newest complete block, in float32 (float64 for float64).
        seen: (B,) int64, the tokens of each row.
    """

    k: Tensor
    v: Tensor
    s: Tensor
    seen: Tensor


@dataclass(frozen=True)
class BlockRecurrentConfig:
    """Describes a `BlockRecurrent` mixer.

    Attributes:
        head_dim: D.
        num_states: M.
        block_size: L.
        window_size: W, the keys that a token sees, including its own; at least L.
        alibi: formula of the slopes of the tokens' window.
        gate: "fixed" or "lstm".
        norm_eps: epsilon of the states' norm.
    """

    head_dim: int = 64
    num_states: int = 512
    block_size: int = 512
    window_size: int = 512
    alibi: AlibiFormula | None = "olmo"
    gate: Literal["fixed", "lstm"] = "fixed"
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("head_dim", "num_states", "block_size", "window_size"):
            check_size("BlockRecurrentConfig", name, getattr(self, name))
        if self.window_size < self.block_size:
            raise ValueError(
                f"window_size must be at least the block_size, {self.block_size}, "
                f"got {self.window_size}"
            )
        if not 0 < self.norm_eps <= 100:
            raise ValueError(f"norm_eps must be above 0 and at most 100, got {self.norm_eps}")

    def build(self, d_model: int) -> "BlockRecurrent":
        """Build the mixer, on torch's default device; a ValueError if head_dim does not divide."""
        return BlockRecurrent(d_model, self)


class _Blocks(NamedTuple):
    """How the tokens of a call are cut into blocks."""

    slot: Tensor  # (B, T) int64, each token's place in N blocks of L
    is_first: Tensor  # (B, N), whether a sequence begins with the block
    is_complete: Tensor  # (B, N), whether the block ends in this call


class BlockRecurrent(AbstractMixer):
    """Tokens and recurrent states that attend to each other, (B, T, C) to (B, T, C).

    It takes the place of attention in one layer or a few. Its loop runs over blocks, not tokens.
    """

    state_type = BlockRecurrentState

    def __init__(self, d_model: int, config: BlockRecurrentConfig) -> None:
        """Create the projections.

        Raises:
            ValueError: if `head_dim` does not divide `d_model`.
        """
        super().__init__()
        check_size("BlockRecurrent", "d_model", d_model)
        if d_model % config.head_dim:
            raise ValueError(f"head_dim must divide d_model, got {config.head_dim} and {d_model}")
        C, M = d_model, config.num_states
        self.d_model, self.config, self.num_heads = C, config, C // config.head_dim
        self.token_qkv = Linear(C, 4 * C, bias=False)  # q to tokens, q to states, k, v
        self.state_qkv = Linear(C, 4 * C, bias=False)  # q to states, q to tokens, k, v
        self.token_out = Linear(2 * C, C, bias=False)
        self.state_out = Linear(2 * C, C, bias=False)
        self.state_norm = nn.RMSNorm(C, eps=config.norm_eps)
        self.state_ids = nn.Parameter(torch.empty(M, C))
        self.first_states = nn.Parameter(torch.empty(M, C))
        self.is_lstm = config.gate == "lstm"
        self.gate = Linear(C, 3 * C if self.is_lstm else C)  # z; or z, i, f
        self.forget = None if self.is_lstm else nn.Parameter(torch.empty(C))
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Draw the first states and their ids; fixed gates start near 0.9, a memory of ten blocks.

        These values are ours.
        """
        nn.init.normal_(self.state_ids, std=0.02)
        nn.init.normal_(self.first_states, std=1.0)
        if self.forget is not None:
            nn.init.constant_(self.forget, 2.2)

    def forward(
        self,
        x: Tensor,
        state: BlockRecurrentState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, BlockRecurrentState | None]:
        """Mix along time; arguments and results as `AbstractMixer.forward` says."""
        self.check_input(x, state, cu_seqlens, lengths)
        B, T = x.shape[:2]
        if T == 0:
            return x, state
        x = without_padding(x, lengths)
        q, q_states, k, v = self._heads(self.token_qkv(x))
        cache = None if state is None else KVCache(state.k, state.v, state.seen)
        W, alibi = self.config.window_size, self.config.alibi
        own, cache = attend_and_keep(
            q, k, v, cache, window_size=W, alibi=alibi, cu_seqlens=cu_seqlens, lengths=lengths
        )
        seen = torch.zeros(B, dtype=torch.int64, device=x.device) if state is None else state.seen
        after = seen + (T if lengths is None else lengths)
        blocks = (
            self._blocks(seen, after, T, fresh=state is None)
            if cu_seqlens is None
            else self._packed_blocks(cu_seqlens, T)
        )
        s, read = self._run_states(q_states, k, v, state, blocks)
        y = self.token_out(torch.cat([own.flatten(2), read.flatten(2)], -1))
        if state is None or cache is None:
            return y, None
        return y, BlockRecurrentState(cache.k, cache.v, s.to(state.s.dtype), after)

    def _heads(self, projected: Tensor) -> tuple[Tensor, ...]:
        """Cut (B, X, 4 C) into four of (B, X, H, D)."""
        heads = (self.num_heads, self.config.head_dim)
        return tuple(part.unflatten(-1, heads) for part in projected.chunk(4, -1))

    def _run_states(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: BlockRecurrentState | None,
        blocks: _Blocks,
    ) -> tuple[Tensor, Tensor]:
        """Run the states over the blocks, with the tokens' q, k and v (B, T, H, D).

        Returns the last states, and the tokens' attention to the states, (B, T, H, D).
        """
        (B, N), L = blocks.is_first.shape, self.config.block_size
        first = self._first_states(B)
        s = first if state is None else state.s
        grid = [x.new_zeros(B, N * L, *x.shape[2:]) for x in (q, k, v)]
        if state is not None:  # take the open block's earlier tokens from the window
            earlier = (state.seen // L * L)[:, None] + torch.arange(L, device=q.device)
            index = (earlier % self.config.window_size)[..., None, None]
            is_there = (earlier < state.seen[:, None])[..., None, None]
            for i, ring in ((1, state.k), (2, state.v)):
                old = ring.gather(1, index.expand(-1, -1, *ring.shape[2:]))
                grid[i][:, :L] = torch.where(is_there, old, 0).to(grid[i].dtype)
        slot = blocks.slot[..., None, None].expand_as(q)
        tokens = [x.scatter(1, slot, new) for x, new in zip(grid, (q, k, v), strict=True)]
        read = []
        for block, (bq, bk, bv) in enumerate(zip(*(x.split(L, 1) for x in tokens), strict=True)):
            s = torch.where(blocks.is_first[:, block, None, None], first, s)
            s_q, s_to_tokens, s_k, s_v = self._heads(self.state_qkv(self._normed(s).to(q.dtype)))
            read.append(attention(bq, s_k, s_v, causal=False).out)
            h = torch.cat(
                [
                    attention(s_q, s_k, s_v, causal=False).out.flatten(2),
                    attention(s_to_tokens, bk, bv, causal=False).out.flatten(2),
                ],
                -1,
            )
            is_complete = blocks.is_complete[:, block, None, None]
            s = torch.where(is_complete, self._gated(s, self.state_out(h)), s)
        return s, torch.cat(read, 1).gather(1, slot)

    def _first_states(self, batch: int) -> Tensor:
        dtype = accumulation_dtype(self.first_states.dtype)
        return self.first_states.to(dtype).expand(batch, -1, -1)

    def _normed(self, s: Tensor) -> Tensor:
        return self.state_norm(s.to(self.state_ids.dtype)) + self.state_ids

    def _gated(self, s: Tensor, h: Tensor) -> Tensor:
        """Return the states of the next block, in the precision of s."""
        if self.forget is not None:
            g = self.forget.to(s.dtype).sigmoid()
            return g * s + (1 - g) * self.gate(h)
        z, i, f = self.gate(h).to(s.dtype).chunk(3, -1)
        return (f + 1).sigmoid() * s + (i - 1).sigmoid() * z.tanh()

    def _blocks(self, seen: Tensor, after: Tensor, num_tokens: int, *, fresh: bool) -> _Blocks:
        """Cut tokens into blocks; rows go on from `seen` (B,), and tokens to `after` are real."""
        L = self.config.block_size
        inside = seen % L
        # As many blocks as any row can need, whatever `seen` is.
        num_blocks = -(-num_tokens // L) if fresh else (num_tokens + L - 2) // L + 1
        block = torch.arange(num_blocks, device=seen.device)
        slot = inside[:, None] + torch.arange(num_tokens, device=seen.device)
        ends = (seen // L * L)[:, None] + (block + 1) * L
        # A row begins with the weights `first_states`, and not the zeros of a state: so they learn.
        is_first = (seen[:, None] == 0) & (block == 0)
        return _Blocks(slot, is_first, ends <= after[:, None])

    def _packed_blocks(self, cu_seqlens: Tensor, num_tokens: int) -> _Blocks:
        """Cut packed sequences into blocks; each begins a new block."""
        L = self.config.block_size
        blocks = packed_chunks(num_tokens, L, cu_seqlens)
        block = torch.arange(blocks.num_chunks, device=cu_seqlens.device)
        is_first = (block[:, None] == blocks.starts[:-1]).any(1)
        # An incomplete block may count as complete: its sequence ends, so nobody reads its states.
        slot = blocks.chunk * L + blocks.offset
        return _Blocks(slot[None], is_first[None], torch.ones_like(is_first)[None])

    def init_state(self, batch: int) -> BlockRecurrentState:
        """Return the state before the first token; `forward` replaces its zeros by the weights."""
        window = (batch, self.config.window_size, self.num_heads, self.config.head_dim)
        like = self.first_states
        # Not `like.new_zeros`: if `like` is sharded, the result would be too, but rows are not.
        zeros = partial(torch.zeros, device=like.device)
        k, v = (zeros(window, dtype=like.dtype) for _ in range(2))
        s = zeros(batch, *like.shape, dtype=accumulation_dtype(like.dtype))
        return BlockRecurrentState(k, v, s, zeros(batch, dtype=torch.int64))

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the window and the states of one sequence, for any length."""
        dtype = self.first_states.dtype
        window = 2 * self.config.window_size * dtype.itemsize
        states = self.config.num_states * accumulation_dtype(dtype).itemsize
        return (window + states) * self.d_model

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the FLOPs per token: 2 for each weight, 4 C for each key or state that it sees.

        The work of the states is divided among the L tokens of a block.
        """
        C, M, L = self.d_model, self.config.num_states, self.config.block_size
        window = min(self.config.window_size, num_tokens)
        keys = window * (window + 1) / 2 + (num_tokens - window) * window
        token = 2 * (4 + 2) * C * C + 4 * C * (keys / max(num_tokens, 1) + M)
        state = 2 * ((4 + 2) * C * C + self.gate.weight.numel()) + 4 * C * (M + L)
        return token + state * M / L
