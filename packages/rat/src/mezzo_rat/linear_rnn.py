"""The paper's recurrent baseline: a gated linear RNN over the whole sequence."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.checks import check_size
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor, nn

from mezzo_rat.gate_bias import init_gate_bias
from mezzo_rat.ops.gated_scan import gated_scan


@dataclass(frozen=True)
class LinearRNNConfig:
    """Gated linear RNN."""

    span: int = 4096
    """The training context T. The gates start with memories of up to this many tokens."""

    def build(self, d_model: int) -> "LinearRNN":
        """Build the mixer.

        Raises:
            TypeError: if `span` is not an int.
            ValueError: if it is not positive.
        """
        return LinearRNN(self, d_model)


class LinearRNNState(NamedTuple):
    """The decoding state."""

    h: Tensor
    """(B, C) float32: v~ of the last token."""
    lengths: Tensor
    """(B,) int64: the tokens that each row has seen."""


class LinearRNN(AbstractMixer):
    """h[t] = f h[t-1] + (1 - f) v[t], out = (sigmoid(z) h) Wo, with f = sigmoid(g + b)."""

    state_type = LinearRNNState

    def __init__(self, config: LinearRNNConfig, d_model: int) -> None:
        super().__init__()
        check_size("LinearRNN", "d_model", d_model)
        check_size("LinearRNN", "span", config.span)
        self.config, self.d_model = config, d_model
        self.in_proj = Linear(d_model, 3 * d_model, bias=False)  # z, v, g
        self.gate_bias = nn.Parameter(torch.empty(d_model))
        self.out_proj = Linear(d_model, d_model, bias=False)
        self.init_own_weights()

    def init_own_weights(self) -> None:
        """Start the forget gates so that their memories span the context (log u, u ~ U(1, T-1))."""
        init_gate_bias(self.gate_bias, self.config.span)

    def forward(
        self,
        x: Tensor,
        state: LinearRNNState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, LinearRNNState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        T = x.shape[1]
        out, last = gated_scan(
            self.in_proj(without_padding(x, lengths)),
            gate_bias=self.gate_bias,
            initial_state=None if state is None else state.h,
            cu_seqlens=cu_seqlens,
            lengths=lengths,
        )
        if state is not None:
            state = LinearRNNState(last, state.lengths + (T if lengths is None else lengths))
        return self.out_proj(out), state

    def init_state(self, batch: int) -> LinearRNNState:
        """Return the state before the first token."""
        device, dtype = self.out_proj.weight.device, accumulation_dtype(self.out_proj.weight.dtype)
        h = torch.zeros(batch, self.d_model, dtype=dtype, device=device)
        return LinearRNNState(h, torch.zeros(batch, dtype=torch.int64, device=device))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token: projections 2·4C², recurrence 3C, output gate C."""
        return 8 * self.d_model**2 + 4 * self.d_model
