"""The layers of Zoology's small models (arXiv 2312.04927), as blocks of core's `LM`.

A layer is y = x + mixer(norm x), with a LayerNorm and without an MLP; or y + norm y, with the
identity in the MLP's place. Attention could not tell a token's neighbours without positions: a
block before the first layer adds a learned embedding of them.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractBlock, AbstractMixer, MixerConfig
from mezzo_core.nn.block import AbstractMixerBlock
from mezzo_core.ops.checks import check_size, is_read
from mezzo_core.positions import sequence_positions
from torch import Tensor, nn


@dataclass(frozen=True)
class MixerOnlyConfig:
    """Describes a `MixerOnly`.

    Attributes:
        mixer: what mixes along time.
        dropout: share of the inputs that training sets to zero, before norm and residual.
        identity_mlp: after the mixer, add the norm once more. The released program has the identity
            in the MLP's place, between its norm and its residual.
    """

    mixer: MixerConfig
    dropout: float = 0.0
    identity_mlp: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be from 0 to below 1, got {self.dropout}")

    def build(self, d_model: int) -> "MixerOnly":
        """Build the block, on torch's default device; a ValueError if the mixer refuses C."""
        return MixerOnly(self.mixer.build(d_model), d_model, self)


class MixerOnly(AbstractMixerBlock):
    """y = x + mixer(norm x), without an MLP; with an identity as the MLP, y + norm y."""

    def __init__(self, mixer: AbstractMixer, d_model: int, config: MixerOnlyConfig) -> None:
        super().__init__()
        self.d_model = d_model
        self.dropout = nn.Dropout(config.dropout)
        self.norm = nn.LayerNorm(d_model)
        self.mixer = mixer
        self.mlp_norm = nn.LayerNorm(d_model) if config.identity_mlp else None

    def forward(
        self,
        x: Tensor,
        state: Any = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Map (B, T, C) to (B, T, C); arguments and results as `AbstractBlock.forward` says."""
        x = self.dropout(self.without_padding(x, state, lengths))
        mixed, state = self.mixer(self.norm(x), state, cu_seqlens=cu_seqlens, lengths=lengths)
        return self._with_mlp(x + mixed), state

    def step(self, x: Tensor, state: Any) -> Tensor:
        """Decode one token of every row, (B, 1, C) to (B, 1, C), overwriting the state in place."""
        x = self.dropout(x)
        return self._with_mlp(x + self.mixer.step(self.norm(x), state))

    def _with_mlp(self, y: Tensor) -> Tensor:
        return y if self.mlp_norm is None else y + self.mlp_norm(y)

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the mixer's forward FLOPs a token (the norms left out)."""
        return self.mixer.flops_per_token(num_tokens)


class Seen(NamedTuple):
    """State of `Positions`: how many tokens each row has had, (B,) int64."""

    tokens: Tensor


@dataclass(frozen=True)
class PositionsConfig:
    """Describes `Positions` for sequences of up to `num_positions` tokens."""

    num_positions: int

    def __post_init__(self) -> None:
        check_fields(self)
        check_size("PositionsConfig", "num_positions", self.num_positions)

    def build(self, d_model: int) -> "Positions":
        """Build the block, on torch's default device."""
        check_size("PositionsConfig", "d_model", d_model)
        return Positions(d_model, self.num_positions)


class Positions(AbstractBlock):
    """x + E[position], with a learned row of E for each position; it comes before all layers."""

    state_type = Seen

    def __init__(self, d_model: int, num_positions: int) -> None:
        super().__init__()
        self.d_model, self.num_positions = d_model, num_positions
        self.embed = nn.Embedding(num_positions, d_model)

    def forward(
        self,
        x: Tensor,
        state: Seen | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Seen | None]:
        """Add the positions; arguments and results as `AbstractBlock.forward` says.

        Raises:
            ValueError: also if a sequence has more tokens than there are positions (on a GPU these
                tokens get the last position instead).
        """
        self.check_input(x, state, cu_seqlens, lengths)
        T, last = x.shape[1], self.num_positions - 1
        place = sequence_positions(T, cu_seqlens, None if state is None else state.tokens, x.device)
        is_over = place > last
        if lengths is not None:
            is_over = is_over & (torch.arange(T, device=x.device) < lengths[:, None])
        if is_read(is_over) and is_over.any():
            raise ValueError(f"a sequence is longer than the {self.num_positions} positions of x")
        y = x + self.embed(place.clamp(max=last))
        if state is None:
            return y, None
        return y, Seen(state.tokens + (T if lengths is None else lengths))

    def init_state(self, batch: int) -> Seen:
        """Return a count of no tokens."""
        return Seen(torch.zeros(batch, dtype=torch.int64, device=self.embed.weight.device))

    def state_bytes(self, num_tokens: int) -> int:
        """Return 0: the state is a counter."""
        return 0

    def flops_per_token(self, num_tokens: int) -> float:
        """Return 0: there is no matrix."""
        return 0.0
