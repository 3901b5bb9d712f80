"""ABC as in flash-linear-attention: with RoPE, bounded scores and an output gate."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.norm import RMSNorm
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import apply_rope, rope_angles, sequence_positions
from torch import Tensor

from mezzo_gsa.heads import norm_and_gate, plan_heads, state_zeros
from mezzo_gsa.ops import ABCState, chunk_abc, step_abc_
from mezzo_gsa.ops.gates import skip_padding


@dataclass(frozen=True)
class GatedABCConfig:
    """ABC whose slots average the tokens, as in flash-linear-attention's models."""

    num_heads: int = 4
    num_slots: int = 64
    """M, the slots of a head's memory."""
    expand_k: float = 0.5
    """Width of all queries, in units of d_model."""
    expand_v: float = 1.0
    """Width of all heads' outputs, in units of d_model."""
    rope_base: float | None = 10_000.0
    """Base of RoPE, which rotates queries and keys; None: no RoPE."""
    score_bounds: tuple[float, float] = (-32.0, 32.0)
    """The least and the largest raw score; scores beyond have no gradient."""
    norm_eps: float = 1e-5

    def build(self, d_model: int) -> "GatedABC":
        """Build the mixer.

        Raises:
            ValueError: if a field has a wrong type or value, the widths do not divide, a head's
                keys have an odd width although they have RoPE, or the bounds are not in order.
        """
        return GatedABC(self, d_model)


class GatedABCState(NamedTuple):
    """The decoding state."""

    k: Tensor
    """(B, H, M, K) float32, the slots of keys."""
    v: Tensor
    """(B, H, M, V) float32, the slots of values."""
    z: Tensor
    """(B, H, M) float32, the log of the sum of exp(s) so far."""
    lengths: Tensor
    """(B,) int64: the tokens that each row has seen."""


class GatedABC(AbstractMixer):
    """The mixer: y = (RMSNorm(ABC(q, k, v, s)) ⊙ swish(x Wz)) Wo.

    q, k, v = x Wq, x Wk, x Wv, and s = x Ws within bounds. Slots average the tokens (the reading
    "code" of `chunk_abc`), queries and keys have RoPE, the scale is K^-1/2, and the norm is over
    each head.

    The rows of `in_proj.weight` are those of Wq, Wk, Wv, Wz and Ws, by head; `out_proj` is Wo.
    """

    state_type = GatedABCState

    def __init__(self, config: GatedABCConfig, d_model: int) -> None:
        super().__init__()
        check_fields(config)
        check_size("GatedABCConfig", "num_slots", config.num_slots)
        _check_bounds(config.score_bounds)
        check_number("GatedABCConfig", "norm_eps", config.norm_eps, positive=True)
        self.config, self.d_model = config, d_model
        H, _, K, V = self.heads = plan_heads(config, d_model)
        if config.rope_base is not None:
            check_number("GatedABCConfig", "rope_base", config.rope_base, positive=True)
            if K % 2:
                raise ValueError(f"RoPE needs keys of an even width, got {K} channels a head")
        self.scale = K**-0.5
        self.widths = (*self.heads.widths, H * V, H * config.num_slots)
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.norm = RMSNorm(V, eps=config.norm_eps)
        self.out_proj = Linear(H * V, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        state: GatedABCState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, GatedABCState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        T = x.shape[1]
        start = None if state is None else state.lengths
        positions = sequence_positions(T, cu_seqlens, start, x.device)
        q, k, v, z, s = self._project(without_padding(x, lengths), positions)
        k, v = skip_padding(lengths, k, v)
        (s,) = skip_padding(lengths, s, fill=float("-inf"))
        out, after = chunk_abc(
            q, k, v, s, reading="code", scale=self.scale, cu_seqlens=cu_seqlens,
            initial_state=None if state is None else _memories(state),
        )  # fmt: skip
        if state is not None:
            state = GatedABCState(*after, state.lengths + (T if lengths is None else lengths))
        return self._output(out, z), state

    def step(self, x: Tensor, state: GatedABCState) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer."""
        self.check_step(x, state)
        q, k, v, z, s = self._project(x, state.lengths[:, None])
        out = step_abc_(
            q[:, 0], k[:, 0], v[:, 0], s[:, 0], _memories(state),
            reading="code", scale=self.scale,
        )  # fmt: skip
        state.lengths.add_(1)
        return self._output(out[:, None], z)

    def _project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """Return q, k, v by head, z (B, T, HV) and the scores s (B, T, H, M) of x (B, T, C)."""
        q, k, v, z, s = self.heads.split(self.in_proj(x), self.widths)
        if (base := self.config.rope_base) is not None:
            dtype = accumulation_dtype(self.out_proj.weight.dtype)
            angles = rope_angles(positions, self.heads.K, base, dtype=dtype)
            q, k = apply_rope(q, *angles), apply_rope(k, *angles)
        s = s.unflatten(-1, (self.heads.H, -1)).clamp(*self.config.score_bounds)
        return q, k, v, z, s

    def _output(self, out: Tensor, z: Tensor) -> Tensor:
        return self.out_proj(norm_and_gate(self.norm, self.config.norm_eps, out, z))

    def init_state(self, batch: int) -> GatedABCState:
        """Return the state before the first token: empty memories and empty sums."""
        _, H, K, V = self.heads
        weight, shape = self.out_proj.weight, (batch, H, self.config.num_slots)
        k, v = (state_zeros(weight, *shape, width) for width in (K, V))
        z = state_zeros(weight, *shape).fill_(float("-inf"))
        return GatedABCState(k, v, z, torch.zeros(batch, dtype=torch.int64, device=z.device))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token of the recurrent form.

        Two for each weight; 3 M (K + V) a head to decay and write its slots, 2 M (K + V) to read
        them; the products of the output gate. RoPE, the running sum, softmax and norm are not
        counted.
        """
        _, H, K, V = self.heads
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        return 2 * weights + 5 * H * self.config.num_slots * (K + V) + H * V


def _memories(state: GatedABCState) -> ABCState:
    return ABCState(state.k, state.v, state.z)


def _check_bounds(bounds: tuple[float, float]) -> None:
    for bound in bounds:
        check_number("GatedABCConfig", "each of score_bounds", bound)
    if bounds[0] >= bounds[1]:
        raise ValueError(
            f"GatedABCConfig: score_bounds must be the lower and the upper one, got {tuple(bounds)}"
        )
