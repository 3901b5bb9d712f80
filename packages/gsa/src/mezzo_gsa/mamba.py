"""Mamba, the mixer: a selective state space model, a baseline of the paper."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.checks import check_size
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.scan import linear_scan
from torch import Tensor, nn

from mezzo_gsa.heads import state_zeros
from mezzo_gsa.short_conv import Past, ShortConv

SHORTEST, LONGEST = 1e-3, 0.1  # the time steps that channels start with


@dataclass(frozen=True)
class MambaConfig:
    """Mamba 1 (arXiv:2312.00752); the defaults are its paper's."""

    expand: int = 2
    """Width E of the state's channels, in units of d_model."""
    state_size: int = 16
    """Numbers of the state for each channel, N."""
    conv_width: int = 4
    """Tokens of the convolution before the scan, the current one counted."""
    dt_rank: int | None = None
    """Rank of the projection to time steps; None: d_model / 16, rounded up."""

    def build(self, d_model: int) -> "Mamba":
        """Build the mixer.

        Raises:
            TypeError: if a field is not an int.
            ValueError: if it is not positive.
        """
        return Mamba(self, d_model)


class MambaState(NamedTuple):
    """The decoding state."""

    tokens: Tensor
    """(B, conv_width - 1, E) float32: the earlier tokens that the convolution reads."""
    h: Tensor
    """(B, E, N) float32."""


class Mamba(AbstractMixer):
    """The Mamba mixer: y = (SSM(u) ⊙ silu(z)) Wo, where u = silu(conv(x Wu)) and z = x Wz.

    Of u, a token computes the time steps dt = softplus(W2 W1 u + b) (E,), and b and c (N,):

        h[t]   = exp(-dt[t] ⊗ r) ⊙ h[t-1] + (dt[t] ⊙ u[t]) ⊗ b[t]        (E, N), r = exp(log_rates)
        SSM[t] = h[t] c[t] + skip ⊙ u[t]

    The rows of `in_proj.weight` are those of Wu and Wz, the rows of `x_proj.weight` those that give
    W1 u, b and c; `dt_proj` is W2 and b, `out_proj` Wo.

    In training the states of all tokens are in memory, N times as many numbers as u has.
    """

    state_type = MambaState

    def __init__(self, config: MambaConfig, d_model: int) -> None:
        super().__init__()
        check_size("Mamba", "d_model", d_model)
        rank = math.ceil(d_model / 16) if config.dt_rank is None else config.dt_rank
        for name in ("expand", "state_size", "conv_width"):
            check_size("MambaConfig", name, getattr(config, name))
        check_size("MambaConfig", "dt_rank", rank)
        self.config, self.d_model = config, d_model
        E, N = config.expand * d_model, config.state_size
        self.widths = (rank, N, N)
        self.in_proj = Linear(d_model, 2 * E, bias=False)
        self.conv = ShortConv(E, config.conv_width)
        self.x_proj = Linear(E, sum(self.widths), bias=False)
        self.dt_proj = Linear(rank, E)
        # One-dimensional, so without weight decay, which would change all memories.
        self.log_rates = nn.Parameter(torch.empty(E * N))
        self.skip = nn.Parameter(torch.empty(E))
        self.out_proj = Linear(E, d_model, bias=False)
        self.init_own_weights()

    @torch.no_grad()
    def init_own_weights(self) -> None:
        """Start as Mamba's code does: rates 1 to N, and time steps log-uniform in 0.001 to 0.1."""
        N = self.config.state_size
        rates = torch.arange(1, N + 1, device=self.log_rates.device)
        self.log_rates.copy_(rates.log().repeat(self.skip.shape[0]))
        nn.init.ones_(self.skip)
        nn.init.uniform_(self.dt_proj.weight, -(self.widths[0] ** -0.5), self.widths[0] ** -0.5)
        bias = self.dt_proj.bias
        steps = nn.init.uniform_(bias, math.log(SHORTEST), math.log(LONGEST)).exp()
        bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus(bias) = steps

    def forward(
        self,
        x: Tensor,
        state: MambaState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, MambaState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        u, z = self.in_proj(without_padding(x, lengths)).chunk(2, -1)
        past, h = (None, None) if state is None else (Past(state.tokens), state.h)
        u, past = self.conv(u, past, cu_seqlens=cu_seqlens, lengths=lengths)
        u = F.silu(u)
        low, write, read = self.x_proj(u).split(self.widths, -1)
        dtype = accumulation_dtype(z.dtype)
        # In padding no time passes, which changes no state.
        dt = without_padding(F.softplus(self.dt_proj(low).to(dtype)), lengths)
        rates = self.log_rates.to(dtype).exp().unflatten(0, (-1, self.config.state_size))
        added = (dt * u)[..., None] * write[..., None, :].to(dtype)
        found = linear_scan(
            (-dt[..., None] * rates).exp(), added, initial_state=h, cu_seqlens=cu_seqlens
        )
        y = (found.out * read[..., None, :].to(dtype)).sum(-1) + self.skip * u
        y = self.out_proj(y.to(z.dtype) * F.silu(z))
        if past is None:
            return y, None
        return y, MambaState(past.tokens.to(dtype), found.final_state)

    def init_state(self, batch: int) -> MambaState:
        """Return the state before the first token."""
        weight, E = self.out_proj.weight, self.skip.shape[0]
        sizes = ((batch, self.config.conv_width - 1, E), (batch, E, self.config.state_size))
        return MambaState(*(state_zeros(weight, *size) for size in sizes))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token of the recurrent form.

        Two for each weight of projections and convolution; 6 E N to make, decay, write and read the
        state; 4 E for dt u, the skip and the gate. Activations and biases are not counted.
        """
        E, N = self.config.expand * self.d_model, self.config.state_size
        weights = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        return 2 * weights + 6 * E * N + 4 * E
