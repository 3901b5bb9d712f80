"""Softmax attention as a mixer: RoPE, ALiBi or neither, grouped heads, windows, a KV cache."""

from dataclasses import dataclass
from typing import NamedTuple, get_args

import torch
from torch import Tensor, nn

from mezzo_core.nn.mixer import AbstractMixer, check_mixer_input
from mezzo_core.ops.attention import attention
from mezzo_core.positions import (
    AlibiFormula,
    alibi_slopes,
    apply_rope,
    rope_angles,
    sequence_positions,
)


class KVCache(NamedTuple):
    """State of softmax attention: the keys and values that later tokens may attend to.

    Rows are aligned on the right: with S slots, slot s of a row that has seen n tokens holds token
    n - S + s; a slot for which this is negative holds nothing.

    Attributes:
        k: (B, S, H, D) keys, rotated.
        v: (B, S, H, D) values.
        lengths: (B,) int64, tokens that each row has seen.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class AttentionConfig:
    """Describes an `Attention` mixer.

    Attributes:
        head_dim: width D of a head.
        num_kv_heads: number of key and value heads; as many as query heads when None.
        window_size: W, keys that a token sees, itself counted; all before it when None.
        rope_base: base of RoPE by token position; None for no rotation.
        alibi: which ALiBi slopes bias the scores ("press" or "olmo"); needs `rope_base=None`.
    """

    head_dim: int = 64
    num_kv_heads: int | None = None
    window_size: int | None = None
    rope_base: float | None = 10_000.0
    alibi: AlibiFormula | None = None

    def build(self, d_model: int) -> "Attention":
        """Build the mixer for width `d_model`."""
        return Attention(d_model, self)


class Attention(AbstractMixer):
    """Causal softmax attention, (B, T, C) to (B, T, C), with C / D query heads of width D."""

    def __init__(self, d_model: int, config: AttentionConfig) -> None:
        """Make the projections.

        Raises:
            ValueError: if widths or heads do not divide, the window is empty, the ALiBi formula is
                unknown, or RoPE and ALiBi are both asked for.
        """
        super().__init__()
        _check_config(d_model, config)
        self.d_model = d_model
        self.config = config
        self.num_heads = d_model // config.head_dim
        self.num_kv_heads = config.num_kv_heads or self.num_heads
        kv_width = self.num_kv_heads * config.head_dim
        self.wq = nn.Linear(d_model, d_model, bias=False)
        self.wk = nn.Linear(d_model, kv_width, bias=False)
        self.wv = nn.Linear(d_model, kv_width, bias=False)
        self.wo = nn.Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        state: KVCache | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Attend along time; arguments and results as `AbstractMixer.forward` says.

        Raises:
            ValueError: if an argument breaks the mixer's contract.
        """
        check_mixer_input(x, self.d_model, state, cu_seqlens, lengths)
        B, T, _ = x.shape
        if state is not None and state.lengths.shape != (B,):
            raise ValueError(f"state holds {state.lengths.shape[0]} rows, x has {B}")
        start = None if state is None else state.lengths
        positions = sequence_positions(T, cu_seqlens, start, x.device)
        q, k, v = self._project(x, positions)
        slopes = None
        if self.config.alibi is not None:
            slopes = alibi_slopes(self.num_heads, self.config.alibi, device=x.device)
        seen, q_positions, k_positions = None, None, None
        if state is not None:
            seen = _append(state, k, v)
            # Into an empty cache, queries see this call's keys alone: plain causal attention.
            if state.k.shape[1] > 0:
                q_positions, k, v = positions, seen.k, seen.v
                k_positions = _slot_positions(seen)
        out = attention(
            q,
            k,
            v,
            window_size=self.config.window_size,
            alibi_slopes=slopes,
            cu_seqlens=cu_seqlens,
            q_positions=q_positions,
            k_positions=k_positions,
        ).out
        return self.wo(out.flatten(2)), None if seen is None else self._keep(seen, T, lengths)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, HQ, D), k and v (B, T, H, D); q and k rotated."""
        width = (-1, self.config.head_dim)
        q, k, v = (w(x).unflatten(2, width) for w in (self.wq, self.wk, self.wv))
        if self.config.rope_base is not None:
            cos, sin = rope_angles(positions, self.config.head_dim, self.config.rope_base)
            q, k = apply_rope(q, cos, sin), apply_rope(k, cos, sin)
        return q, k, v

    def _keep(self, seen: KVCache, num_tokens: int, lengths: Tensor | None) -> KVCache:
        """Return the cache without this call's padding and without what no window reaches."""
        k, v, total = seen
        S = k.shape[1]
        if lengths is not None:
            # The padding at a row's end goes out to the left, as slots that hold nothing.
            padding = num_tokens - lengths
            total = total - padding
            slots = (torch.arange(S, device=k.device) - padding[:, None]).clamp(min=0)
            index = slots[:, :, None, None].expand_as(k)
            k, v = k.gather(1, index), v.gather(1, index)
        if self.config.window_size is not None and self.config.window_size - 1 < S:
            # The copy lets go of the longer buffer.
            first = S - (self.config.window_size - 1)
            k, v = k[:, first:].clone(), v[:, first:].clone()
        return KVCache(k, v, total)

    def init_state(self, batch: int) -> KVCache:
        """Return an empty cache for `batch` rows."""
        weight = self.wk.weight
        empty = weight.new_zeros(batch, 0, self.num_kv_heads, self.config.head_dim)
        lengths = torch.zeros(batch, dtype=torch.int64, device=weight.device)
        return KVCache(empty, empty, lengths)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values of one sequence; a window of W keeps W - 1 tokens."""
        window = self.config.window_size
        kept = num_tokens if window is None else min(num_tokens, window - 1)
        width = self.num_kv_heads * self.config.head_dim
        return 2 * kept * width * self.wk.weight.element_size()

    def flops_per_token(self, num_tokens: int) -> float:
        """Return 2 FLOPs a weight, and 4 C for each key that a token sees on average."""
        weights = sum(weight.numel() for weight in self.parameters())
        window = min(self.config.window_size or num_tokens, num_tokens)
        # Token t sees min(t + 1, W) keys: 1 + 2 + ... + W, then W for each of the other T - W.
        keys = window * (window + 1) / 2 + (num_tokens - window) * window
        return 2 * weights + 4 * self.d_model * keys / max(num_tokens, 1)


def _append(state: KVCache, k: Tensor, v: Tensor) -> KVCache:
    """Put this call's tokens, padding included, after the cached ones."""
    # Under autocast the cache follows the activations, not the weights it was started from.
    k, v = torch.cat([state.k.to(k.dtype), k], 1), torch.cat([state.v.to(v.dtype), v], 1)
    return KVCache(k, v, state.lengths + (k.shape[1] - state.k.shape[1]))


def _slot_positions(cache: KVCache) -> Tensor:
    """Return (B, S), the position of the token in each slot, negative where there is none."""
    S = cache.k.shape[1]
    return (cache.lengths - S)[:, None] + torch.arange(S, device=cache.k.device)


def _check_config(d_model: int, config: AttentionConfig) -> None:
    D, H = config.head_dim, config.num_kv_heads
    if D < 1 or d_model < 1 or d_model % D:
        raise ValueError(f"head_dim must divide d_model, got {D} and {d_model}")
    if H is not None and (H < 1 or (d_model // D) % H):
        raise ValueError(f"num_kv_heads must divide the {d_model // D} query heads, got {H}")
    if config.window_size is not None and config.window_size < 1:
        raise ValueError(f"window_size must be at least 1, got {config.window_size}")
    if config.alibi is not None and config.alibi not in get_args(AlibiFormula):
        raise ValueError(f"alibi must be one of {get_args(AlibiFormula)}, got {config.alibi!r}")
    if config.rope_base is not None and config.alibi is not None:
        raise ValueError("alibi and rope_base exclude each other: set rope_base=None for ALiBi")
    if config.rope_base is not None and D % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {D}")
