"""The smallest mixer that keeps a state, has a gate, and can be packed and padded."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from mezzo_core.nn import AbstractMixer
from mezzo_core.ops.padding import without_padding
from mezzo_core.positions import sequence_ids
from torch import Tensor, nn


class MeanState(NamedTuple):
    sum: Tensor
    lengths: Tensor


@dataclass(frozen=True)
class RunningMeanConfig:
    min_gain: float = 0.5
    max_gain: float = 1.5

    def build(self, d_model: int) -> "RunningMean":
        return RunningMean(d_model, self)


class RunningMean(AbstractMixer):
    """y[t] = Wo mean(gain Wv x[0..t]); the state is the sum so far, and how many tokens it has."""

    state_type = MeanState

    def __init__(self, d_model: int, config: RunningMeanConfig) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.value = nn.Linear(d_model, d_model)
        self.gain = nn.Parameter(torch.empty(d_model))
        self.out = nn.Linear(d_model, d_model, bias=False)

    def init_own_weights(self) -> None:
        nn.init.uniform_(self.gain, self.config.min_gain, self.config.max_gain)

    def forward(self, x, state=None, *, cu_seqlens=None, lengths=None):
        self.check_input(x, state, cu_seqlens, lengths)
        v = self.value(without_padding(x, lengths)) * self.gain
        place = torch.arange(x.shape[1], device=x.device)
        if cu_seqlens is not None:
            ids = sequence_ids(x.shape[1], cu_seqlens)
            sees = (ids == ids[:, None]) & (place <= place[:, None])  # (T, T)
            total = v[:, None].masked_fill(~sees[..., None], 0).sum(2)
            return self.out(total / sees.sum(1)[:, None]), None
        seen = self.init_state(x.shape[0]) if state is None else state
        if lengths is not None:
            v = v.masked_fill((place >= lengths[:, None])[..., None], 0)
        total = v.cumsum(1) + seen.sum[:, None]
        count = seen.lengths[:, None] + place + 1
        y = self.out(total / count[..., None])
        added = x.shape[1] if lengths is None else lengths
        return y, None if state is None else MeanState(seen.sum + v.sum(1), seen.lengths + added)

    def init_state(self, batch):
        dtype, device = self.gain.dtype, self.gain.device
        lengths = torch.zeros(batch, dtype=torch.int64, device=device)
        return MeanState(torch.zeros(batch, self.d_model, dtype=dtype, device=device), lengths)

    def flops_per_token(self, num_tokens):
        return 2 * (self.value.weight.numel() + self.out.weight.numel())
