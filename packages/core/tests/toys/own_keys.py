"""A toy paper of the size of a block: its keys and values come from its own output.

The recurrence of the Recurrent Transformer in one head, written as a plain loop over tokens.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from mezzo_core.nn import AbstractBlock, MLPConfig
from mezzo_core.ops.checks import is_read
from mezzo_core.positions import sequence_ids
from torch import Tensor, nn


class OwnKeysState(NamedTuple):
    """Slots of keys and values; those of padding, and those that are still empty, are not real."""

    k: Tensor  # (B, S, C)
    v: Tensor  # (B, S, C)
    real: Tensor  # (B, S) bool
    filled: Tensor  # (B,) int64, the slot that the next step takes


@dataclass(frozen=True)
class OwnKeysConfig:
    """Describes the block."""

    hidden: int = 32

    def build(self, d_model: int) -> "OwnKeysBlock":
        return OwnKeysBlock(d_model, self)


class OwnKeysBlock(AbstractBlock):
    """z = h + MLP(norm h), h = x + Wo attention: over the keys of earlier z, and over x's own."""

    state_type = OwnKeysState

    def __init__(self, d_model: int, config: OwnKeysConfig) -> None:
        super().__init__()
        self.d_model = d_model
        self.norm, self.mlp_norm = nn.RMSNorm(d_model, eps=1e-6), nn.RMSNorm(d_model, eps=1e-6)
        self.wq, self.wk, self.wv, self.wo = (
            nn.Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.mlp = MLPConfig(hidden=config.hidden).build(d_model)
        self.sharpness = nn.Parameter(torch.empty(1))

    def init_own_weights(self) -> None:
        nn.init.constant_(self.sharpness, self.d_model**-0.5)

    def forward(self, x, state=None, *, cu_seqlens=None, lengths=None):
        self.check_input(x, state, cu_seqlens, lengths)
        B, T, _ = x.shape
        old = self.init_state(B) if state is None else state
        real = torch.ones(B, T, dtype=torch.bool, device=x.device)
        if lengths is not None:
            real = torch.arange(T, device=x.device) < lengths[:, None]
            x = x.masked_fill(~real[..., None], 0)
        ids = None if cu_seqlens is None else sequence_ids(T, cu_seqlens)
        k, v, z = [old.k], [old.v], []
        for t in range(T):
            earlier = real[:, :t] if ids is None else real[:, :t] & (ids[:t] == ids[t])
            visible = torch.cat([old.real, earlier], 1)
            z.append(self._token(x[:, t], torch.cat(k, 1), torch.cat(v, 1), visible))
            for cache, new in zip((k, v), self._pair(z[-1]), strict=True):
                cache.append(new[:, None])
        y = torch.stack(z, 1) if z else x
        if state is None:
            return y, None
        filled = torch.full_like(old.filled, old.k.shape[1] + T)
        return y, OwnKeysState(
            torch.cat(k, 1), torch.cat(v, 1), torch.cat([old.real, real], 1), filled
        )

    def step(self, x, state):
        self.check_step(x, state)
        z = self._token(x[:, 0], state.k, state.v, state.real)
        here = torch.arange(state.k.shape[1], device=x.device) == state.filled[:, None]
        for cache, new in zip((state.k, state.v), self._pair(z), strict=True):
            cache.copy_(torch.where(here[..., None], new[:, None], cache))
        state.real.logical_or_(here)
        state.filled.add_(1)
        return z[:, None]

    def check_step(self, x, state):
        super().check_step(x, state)
        slots = state.k.shape[1]
        if is_read(state.filled) and (state.filled >= slots).any():
            raise ValueError(f"state has room for {slots} tokens: reserve more")

    def reserve(self, state, num_tokens):
        self.check_reserve(state, num_tokens)
        B, S = state.real.shape
        k, v = (
            torch.cat([x, x.new_zeros(B, num_tokens, self.d_model)], 1) for x in (state.k, state.v)
        )
        real = torch.cat([state.real, state.real.new_zeros(B, num_tokens)], 1)
        return OwnKeysState(k, v, real, torch.full_like(state.filled, S))

    def overwritten(self):
        return (True,) * 4  # a forward goes on behind all slots, also those that nobody filled

    def init_state(self, batch):
        weight = self.wk.weight
        empty = torch.zeros(batch, 0, self.d_model, dtype=weight.dtype, device=weight.device)
        real = torch.zeros(batch, 0, dtype=torch.bool, device=empty.device)
        filled = torch.zeros(batch, dtype=torch.int64, device=empty.device)
        return OwnKeysState(empty, empty, real, filled)

    def state_bytes(self, num_tokens):
        return 2 * num_tokens * self.d_model * self.wk.weight.element_size()

    def flops_per_token(self, num_tokens):
        weights = sum(weight.numel() for weight in self.parameters())
        return 2 * weights + 4 * self.d_model * (num_tokens + 1) / 2

    def _pair(self, z: Tensor) -> tuple[Tensor, Tensor]:
        n = self.norm(z)
        return self.wk(n), self.wv(n)

    def _token(self, x: Tensor, k: Tensor, v: Tensor, visible: Tensor) -> Tensor:
        """Run one token of every row, (B, C), over the keys (B, S, C) that it may see."""
        n = self.norm(x)
        visible = torch.cat([visible, visible.new_ones(len(x), 1)], 1)  # and itself
        k, v = (
            torch.cat([old, weight(n)[:, None]], 1).masked_fill(~visible[..., None], 0)
            for old, weight in ((k, self.wk), (v, self.wv))
        )
        scores = torch.einsum("bc,bsc->bs", self.wq(n) * self.sharpness, k)
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        h = x + self.wo(torch.einsum("bs,bsc->bc", weights, v))
        return h + self.mlp(self.mlp_norm(h))
