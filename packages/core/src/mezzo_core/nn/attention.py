"""Softmax attention as a mixer: RoPE, ALiBi or neither, grouped heads, windows, a KV cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from mezzo_core.config_json import check_fields
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.norm import NormKind, build_norm
from mezzo_core.ops.attention import attention
from mezzo_core.ops.checks import check_counts, check_number, check_size, is_read
from mezzo_core.ops.decode_attention import append_token_, decode_attention
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import (
    AlibiFormula,
    RopeScaling,
    alibi_slopes,
    apply_rope,
    ring_positions,
    rope_angles,
    sequence_positions,
)


class KVCache(NamedTuple):
    """State of softmax attention: the keys and values that later tokens may attend to.

    Token p of a row is in slot p % S. Without a window there are at least as many slots as tokens.
    With a window of W the slots are a ring, where token p replaces token p - W. Slots beyond the
    newest token are room for later tokens, and their content is arbitrary.

    Attributes:
        k: (B, S, H, D) keys, rotated by RoPE.
        v: (B, S, H, D) values.
        lengths: (B,) int64, the number of tokens that each row has seen.
    """

    k: Tensor
    v: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class AttentionConfig:
    """Describes an `Attention` mixer.

    Attributes:
        head_dim: width D of a head.
        num_kv_heads: number of key and value heads; None for as many as query heads.
        window_size: W, the number of keys that a token sees, including its own; None for all
            keys up to its own.
        rope_base: base of RoPE by token position; None for no rotation.
        alibi: formula of the ALiBi slopes ("press" or "olmo"), or None for no ALiBi; needs
            `rope_base=None`.
        qk_norm: kind of the norms of the projected queries and keys, before RoPE.
        norm_eps: epsilon of these two norms.
        norm_by_head: True norms each head alone, with one weight (D) for all heads, as in Qwen3;
            False norms all heads together.
        qkv_bias: whether queries, keys and values have biases, as in Qwen2.
        num_heads: number HQ of query heads; None for C / D, which fill the width.
        rope_scaling: makes some pairs of RoPE turn more slowly, as in Llama 3.1.
    """

    head_dim: int = 64
    num_kv_heads: int | None = None
    window_size: int | None = None
    rope_base: float | None = 10_000.0
    alibi: AlibiFormula | None = None
    qk_norm: NormKind = "none"
    norm_eps: float = 1e-6
    norm_by_head: bool = False
    qkv_bias: bool = False
    num_heads: int | None = None
    rope_scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        check_fields(self)

    def build(self, d_model: int) -> "Attention":
        """Build the mixer for width `d_model`."""
        return Attention(d_model, self)


class Attention(AbstractMixer):
    """Causal softmax attention, (B, T, C) to (B, T, C), with HQ query heads of width D."""

    state_type = KVCache

    def __init__(self, d_model: int, config: AttentionConfig) -> None:
        """Create the projections.

        Raises:
            ValueError: if widths or heads do not divide, the window is empty, the base of RoPE is
                not positive and finite, the ALiBi formula is unknown, or both RoPE and ALiBi are
                configured.
        """
        super().__init__()
        _check_config(d_model, config)
        self.d_model = d_model
        self.config = config
        self.num_heads = config.num_heads or d_model // config.head_dim
        self.num_kv_heads = config.num_kv_heads or self.num_heads
        width, kv_width = (n * config.head_dim for n in (self.num_heads, self.num_kv_heads))
        self.wq = Linear(d_model, width, bias=config.qkv_bias)
        self.wk = Linear(d_model, kv_width, bias=config.qkv_bias)
        self.wv = Linear(d_model, kv_width, bias=config.qkv_bias)
        self.wo = Linear(width, d_model, bias=False)
        by_head = config.head_dim if config.norm_by_head else None
        self.q_norm = build_norm(config.qk_norm, by_head or width, config.norm_eps)
        self.k_norm = build_norm(config.qk_norm, by_head or kv_width, config.norm_eps)

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
        self.check_input(x, state, cu_seqlens, lengths)
        if state is not None:
            check_cache(state, self.config.window_size)
        q, k, v = self._project(without_padding(x, lengths))
        if (base := self.config.rope_base) is not None:
            start = None if state is None else state.lengths
            positions = sequence_positions(x.shape[1], cu_seqlens, start, x.device)
            dtype = accumulation_dtype(q.dtype)
            angles = rope_angles(
                positions, self.config.head_dim, base, self.config.rope_scaling, dtype=dtype
            )
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        W, alibi = self.config.window_size, self.config.alibi
        out, state = attend_and_keep(
            q, k, v, state, window_size=W, alibi=alibi, cu_seqlens=cu_seqlens, lengths=lengths
        )
        return self.wo(out.flatten(2)), state

    def step(self, x: Tensor, state: KVCache) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C); see `AbstractMixer.step`."""
        self.check_step(x, state)
        new_q, new_k, new_v = (part[:, 0] for part in self._project(x))
        base, scaling = self.config.rope_base, self.config.rope_scaling
        q = append_token_(new_q, new_k, new_v, *state, rope_base=base, rope_scaling=scaling)
        out = decode_attention(q, *state, alibi_slopes=_slopes(new_q, self.config.alibi))
        # Attention ran in the cache's dtype; the projection runs in the token's.
        return self.wo(out.to(new_q.dtype).flatten(1)[:, None])

    def check_step(self, x: Tensor, state: KVCache) -> None:
        """Check the arguments of `step`, the room in the cache included."""
        super().check_step(x, state)
        check_room(state, self.config.window_size)

    def reserve(self, state: KVCache, num_tokens: int) -> KVCache:
        """Return a copy of the cache with slots for `num_tokens` more tokens of every row."""
        self.check_reserve(state, num_tokens)
        return reserve_cache(state, num_tokens, self.config.window_size)

    def overwritten(self) -> tuple[bool, ...]:
        """Tell that a window overwrites keys and values; without a window they grow."""
        is_ring = self.config.window_size is not None
        return (is_ring, is_ring, True)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q (B, T, HQ, D), k and v (B, T, H, D)."""
        width = (-1, self.config.head_dim)
        q, k, v = self.wq(x), self.wk(x), self.wv(x).unflatten(2, width)
        if self.config.norm_by_head:
            return self.q_norm(q.unflatten(2, width)), self.k_norm(k.unflatten(2, width)), v
        return self.q_norm(q).unflatten(2, width), self.k_norm(k).unflatten(2, width), v

    def init_state(self, batch: int) -> KVCache:
        """Return an empty cache for `batch` rows."""
        return empty_cache(batch, self.num_kv_heads, self.config.head_dim, self.wk.weight)

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values of one sequence; a window of W keeps W tokens."""
        slots = _num_slots(num_tokens, self.config.window_size)
        width = self.num_kv_heads * self.config.head_dim
        return 2 * slots * width * self.wk.weight.element_size()

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the FLOPs per token: 2 for each weight, and 4 HQ D for each visible key."""
        weights = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        window = min(self.config.window_size or num_tokens, num_tokens)
        # Token t sees min(t + 1, W) keys: 1 + 2 + ... + W, then W for each of the other T - W.
        keys = window * (window + 1) / 2 + (num_tokens - window) * window
        return 2 * weights + 4 * self.wq.out_features * keys / max(num_tokens, 1)


def attend_and_keep(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KVCache | None,
    *,
    window_size: int | None,
    alibi: AlibiFormula | None,
    cu_seqlens: Tensor | None,
    lengths: Tensor | None,
) -> tuple[Tensor, KVCache | None]:
    """Attend to the tokens of a cache, if there is one, and to those of this call.

    q is (B, T, HQ, D), k and v are (B, T, H, D), after RoPE. `window_size` and `alibi` are as in
    `AttentionConfig`, `cu_seqlens` and `lengths` as in `AbstractMixer.forward`.

    Returns:
        The output (B, T, HQ, D), and the cache with this call's keys and values.
    """
    T, q_positions, k_positions = q.shape[1], None, None
    # With an empty cache, queries only see this call's keys: plain causal attention.
    if cache is not None and cache.k.shape[1] > 0:
        # Under autocast, init_state gave the cache the weights' dtype: cast it to that of k.
        k = torch.cat([cache.k.to(k.dtype), k], 1)
        v = torch.cat([cache.v.to(v.dtype), v], 1)
        cached = ring_positions(cache.lengths, cache.k.shape[1])
        q_positions = sequence_positions(T, None, cache.lengths, q.device)
        k_positions = torch.cat([cached, q_positions], 1)
    out = attention(
        q,
        k,
        v,
        window_size=window_size,
        alibi_slopes=_slopes(q, alibi),
        cu_seqlens=cu_seqlens,
        q_positions=q_positions,
        k_positions=k_positions,
    ).out
    if cache is None:
        return out, None
    return out, _keep(cache, k, v, cache.lengths + (T if lengths is None else lengths), window_size)


def _slopes(q: Tensor, alibi: AlibiFormula | None) -> Tensor | None:
    """Return the slopes of the heads of q (..., HQ, D); None without ALiBi."""
    if alibi is None:
        return None
    return alibi_slopes(q.shape[-2], alibi, device=q.device, dtype=accumulation_dtype(q.dtype))


def _keep(old: KVCache, k: Tensor, v: Tensor, lengths: Tensor, window_size: int | None) -> KVCache:
    """Return the new cache; k and v hold the old cache's slots, then this call's tokens."""
    old_slots, S = old.k.shape[1], _num_slots(k.shape[1], window_size)
    if old_slots == 0 and k.shape[1] == S:
        return KVCache(k, v, lengths)
    if k.shape[1] == S:  # old tokens keep their slots, and new ones go behind them
        slots = old.lengths[:, None] + torch.arange(S - old_slots, device=lengths.device)
        slots = slots[:, :, None, None].expand(-1, -1, *k.shape[2:])
        k, v = (x.scatter(1, slots, x[:, old_slots:]) for x in (k, v))
        return KVCache(k, v, lengths)
    position = ring_positions(lengths, S)
    is_new = position >= old.lengths[:, None]
    index = torch.where(
        is_new, position - old.lengths[:, None] + old_slots, position % max(old_slots, 1)
    )
    index = index[:, :, None, None].expand(-1, -1, *k.shape[2:])
    return KVCache(k.gather(1, index), v.gather(1, index), lengths)


def empty_cache(batch: int, num_heads: int, head_dim: int, like: Tensor) -> KVCache:
    """Return a cache without tokens for `batch` rows, in the dtype and on the device of `like`."""
    # Not `like.new_zeros`: if `like` is sharded, the result would be too, but rows are not.
    empty = torch.zeros(batch, 0, num_heads, head_dim, dtype=like.dtype, device=like.device)
    return KVCache(empty, empty, torch.zeros(batch, dtype=torch.int64, device=like.device))


def reserve_cache(state: KVCache, num_tokens: int, window_size: int | None = None) -> KVCache:
    """Return a copy with slots for `num_tokens` more tokens of every row; waits for a GPU.

    Raises:
        ValueError: as `check_cache`.
    """
    check_cache(state, window_size)
    longest = int(state.lengths.max()) if state.lengths.numel() else 0
    S = _num_slots(longest + num_tokens, window_size)
    # If a row has more tokens than slots, the slots are a full ring of W, which stays as it is.
    kept = min(longest, state.k.shape[1])
    shape = state.k.shape[0], S, *state.k.shape[2:]
    k, v = state.k.new_zeros(shape), state.v.new_zeros(shape)
    k[:, :kept], v[:, :kept] = state.k[:, :kept], state.v[:, :kept]
    return KVCache(k, v, state.lengths.clone())


def check_cache(state: KVCache, window_size: int | None = None) -> None:
    """Check that the slots can hold each row's tokens; lengths are read on a CPU only.

    Raises:
        ValueError: if a row has more tokens than slots, unless the slots are the ring of a whole
            window; if there are more slots than the window has; or if a length is negative.
    """
    S = state.k.shape[1]
    if window_size is not None and window_size < S:
        raise ValueError(f"state.k must have at most {window_size} slots, the window, got {S}")
    check_counts("KVCache", "state.lengths", state.lengths, "S", None if window_size == S else S)


def check_room(state: KVCache, window_size: int | None = None) -> None:
    """Check as `check_cache`, and raise a ValueError if, on a CPU, a row is full."""
    check_cache(state, window_size)
    S, lengths = state.k.shape[1], state.lengths
    if window_size != S and is_read(lengths) and (lengths == S).any():
        raise ValueError(f"state has room for {S} tokens, and a row has them all: reserve more")


def check_alike(caches: Sequence[KVCache], name: str = "state") -> None:
    """Raise a ValueError if layers' caches differ in their slots or, on a CPU, in their lengths."""
    first = caches[0]
    for i, cache in enumerate(caches):
        if cache.k.shape != first.k.shape:
            raise ValueError(
                f"{name}[{i}].k must be {tuple(first.k.shape)} as {name}[0].k, "
                f"got {tuple(cache.k.shape)}"
            )
        if is_read(first.lengths) and not torch.equal(cache.lengths, first.lengths):
            row = int((cache.lengths != first.lengths).nonzero()[0])
            raise ValueError(
                f"{name}[{i}].lengths must be those of {name}[0], "
                f"got {int(cache.lengths[row])} and {int(first.lengths[row])} in row {row}"
            )


def _num_slots(num_tokens: int, window_size: int | None) -> int:
    """Return the number of slots for `num_tokens` tokens: a window of W needs at most W."""
    return min(num_tokens, window_size or num_tokens)


def _check_config(d_model: int, config: AttentionConfig) -> None:
    D, H = config.head_dim, config.num_kv_heads
    check_size("AttentionConfig", "head_dim", D)
    check_size("AttentionConfig", "d_model", d_model)
    if config.num_heads is not None:
        check_size("AttentionConfig", "num_heads", config.num_heads)
    elif d_model % D:
        raise ValueError(f"head_dim must divide d_model, got {D} and {d_model}: or set num_heads")
    HQ = config.num_heads or d_model // D
    if H is not None:
        check_size("AttentionConfig", "num_kv_heads", H)
    if H is not None and HQ % H:
        raise ValueError(f"num_kv_heads must divide the {HQ} query heads, got {H}")
    if config.window_size is not None:
        check_size("AttentionConfig", "window_size", config.window_size)
    if config.rope_base is not None and config.alibi is not None:
        raise ValueError("alibi and rope_base exclude each other: set rope_base=None for ALiBi")
    if config.rope_base is not None:
        check_number("AttentionConfig", "rope_base", config.rope_base, positive=True)
    elif config.rope_scaling is not None:
        raise ValueError("rope_scaling needs a rope_base")
    check_number("AttentionConfig", "norm_eps", config.norm_eps, positive=True)
    if config.rope_base is not None and D % 2:
        raise ValueError(f"head_dim must be even for RoPE, got {D}")
