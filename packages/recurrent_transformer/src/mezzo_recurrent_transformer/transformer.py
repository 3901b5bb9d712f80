"""The Transformer that the paper compares with: the same layer without recurrence."""

from dataclasses import dataclass

import torch
from mezzo_core.nn.attention import KVCache, check_cache
from mezzo_core.ops.attention import attention
from mezzo_core.ops.decode_attention import append_token_, decode_attention
from mezzo_core.ops.padding import without_padding
from mezzo_core.positions import sequence_positions
from torch import Tensor

from mezzo_recurrent_transformer.layer import AbstractLayer, LayerConfig, weight_flops


@dataclass(frozen=True)
class TransformerBlockConfig(LayerConfig):
    """Describes a `TransformerBlock`; the attributes are those of `LayerConfig`."""

    def build(self, d_model: int) -> "TransformerBlock":
        """Build the block, on torch's default device; a ValueError if head_dim does not divide."""
        return TransformerBlock(d_model, self)


class TransformerBlock(AbstractLayer):
    """A causal Transformer layer with normalized queries and keys ("The Transformer layer").

    It equals a Recurrent Transformer whose block is as long as the sequence.
    """

    def forward(
        self,
        x: Tensor,
        state: KVCache | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, KVCache | None]:
        """Map (B, T, C) to (B, T, C); arguments and results as `AbstractBlock.forward` says."""
        self.check_input(x, state, cu_seqlens, lengths)
        T = x.shape[1]
        x = without_padding(x, lengths)
        q, k, v = self._project(self.attention_norm(x))
        q_positions, k_positions, after = None, None, None
        slots_k, slots_v = k, v
        if state is not None:
            check_cache(state)
            after = state.lengths + (T if lengths is None else lengths)
            if state.k.shape[1] > 0:
                slots_k, slots_v, k_positions = _appended(state, k, v)
                q_positions = sequence_positions(T, None, state.lengths, x.device)
        out = attention(
            q,
            slots_k,
            slots_v,
            alibi_slopes=None if self.config.alibi is None else self.slopes(),
            cu_seqlens=cu_seqlens,
            q_positions=q_positions,
            k_positions=k_positions,
        ).out
        z = self._finish(x, out.flatten(2))
        return z, None if after is None else KVCache(slots_k, slots_v, after)

    def step(self, x: Tensor, state: KVCache) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        self.check_step(x, state)
        q, k, v = (part[:, 0] for part in self._project(self.attention_norm(x)))
        q = append_token_(q, k, v, *state, rope_base=None)
        out = decode_attention(q, *state, alibi_slopes=self.slopes())
        return self._finish(x, out.to(x.dtype).flatten(1)[:, None])

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs per token: 2 a weight, and 4C for each key that it sees."""
        return weight_flops(self) + 4 * self.d_model * (num_tokens + 1) / 2


def _appended(state: KVCache, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Put each row's new pairs right behind its old ones; return k, v and the slots' positions."""
    B, T = k.shape[:2]
    S = state.k.shape[1]
    slot = (state.lengths[:, None] + torch.arange(T, device=k.device))[..., None, None]
    slot = slot.expand(-1, -1, *k.shape[2:])
    grown = []
    for old, new in ((state.k, k), (state.v, v)):
        room = torch.cat([old.to(new.dtype), torch.zeros_like(new)], 1)
        grown.append(room.scatter(1, slot, new))
    positions = torch.arange(S + T, device=k.device).expand(B, -1)
    return grown[0], grown[1], positions
