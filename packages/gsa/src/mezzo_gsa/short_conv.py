"""A short causal convolution along time, of each channel apart."""

from typing import NamedTuple

import torch
from mezzo_core.nn import AbstractMixer
from mezzo_core.ops.padding import without_padding
from mezzo_core.positions import sequence_positions
from torch import Tensor, nn


class Past(NamedTuple):
    """State of a `ShortConv`: the last width - 1 tokens, (B, width - 1, C); zeros before them."""

    tokens: Tensor


class ShortConv(AbstractMixer):
    """y[t] = b + sum_i w[i] * x[t - i] for i < width: a causal convolution of each channel."""

    state_type = Past

    def __init__(self, d_model: int, width: int) -> None:
        super().__init__()
        self.d_model, self.width = d_model, width
        self.weight = nn.Parameter(torch.empty(width, d_model))
        self.bias = nn.Parameter(torch.empty(d_model))
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Draw weights and biases as torch's Conv1d does, uniformly within width^-1/2."""
        for parameter in (self.weight, self.bias):
            nn.init.uniform_(parameter, -(self.width**-0.5), self.width**-0.5)

    def forward(
        self,
        x: Tensor,
        state: Past | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, Past | None]:
        """Mix along time; arguments and results as `AbstractMixer.forward` says."""
        self.check_input(x, state, cu_seqlens, lengths)
        x = without_padding(x, lengths)
        B, T, C = x.shape
        before = self.width - 1
        past = x.new_zeros(B, before, C) if state is None else state.tokens.to(x.dtype)
        tokens = torch.cat([past, x], 1)
        y = self.bias + self.weight[0] * x
        for i in range(1, self.width):
            earlier = tokens[:, before - i : before - i + T]
            if cu_seqlens is not None:  # earlier tokens may be another sequence's
                place = sequence_positions(T, cu_seqlens)
                earlier = earlier.masked_fill((place < i)[..., None], 0)
            y = y + self.weight[i] * earlier
        if state is None:
            return y, None
        if lengths is None:
            return y, Past(tokens[:, T:].clone())  # a view would keep the whole segment
        index = lengths[:, None] + torch.arange(before, device=x.device)
        return y, Past(tokens.gather(1, index[..., None].expand(-1, -1, C)))

    def init_state(self, batch: int) -> Past:
        """Return zeros for what comes before the first token."""
        shape, like = (batch, self.width - 1, self.d_model), self.weight
        return Past(torch.zeros(shape, dtype=like.dtype, device=like.device))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return 2 FLOPs a weight."""
        return 2 * self.weight.numel()
