"""ABC, attention with bounded-memory control: GSA's slots without its gates (section 2.2)."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.linear import Linear
from mezzo_core.ops.checks import check_size
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import sequence_positions
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo_gsa.gsa import head_width
from mezzo_gsa.ops import GSAState, chunk_gsa, step_gsa_
from mezzo_gsa.ops.gates import gated_norm, skip_padding

NORM_EPS = 1e-5

MIN_LOG_GATE = -30.0
"""Replaces log(0) at a sequence's first token: exp(-30) is negligible beside one."""


@dataclass(frozen=True)
class ABCConfig:
    """ABC, "w/o decay" in the paper's Table 2, in one of two readings of its description."""

    num_heads: int = 4
    num_slots: int = 64
    """M, the slots of a head's memory."""
    reading: Literal["text", "code"] = "text"
    """"text" follows equations 3 and 4: slots sum what is written, with strengths that shrink as
    the sequence grows. "code" follows the authors' program: slots average what is written, so
    older tokens fade."""

    def build(self, d_model: int) -> "ABC":
        """Build the mixer.

        Raises:
            TypeError: if a field has a wrong type.
            ValueError: if the heads do not divide, a size is not positive, or `reading` is unknown.
        """
        return ABC(self, d_model)


class ABCState(NamedTuple):
    """The decoding state, in float32, or in float64 for float64 weights."""

    k: Tensor
    """(B, H, M, D) slots of keys."""
    v: Tensor
    """(B, H, M, D) slots of values."""
    z: Tensor
    """(B, H, M) log of the sum of exp(logits) so far; -inf before the first token."""


class ABC(AbstractMixer):
    """The ABC mixer. With l = x Wφ and z[t] = log Σ_{j≤t} exp(l[j]), for each head and slot:

        text:  K~[t] = K~[t-1] + φ[t] ⊗ k[t],                φ[t] = exp(l[t] - z[t])
        code:  K~[t] = α[t] K~[t-1] + (1 - α[t]) ⊗ k[t],     α[t] = exp(z[t-1] - z[t])

    V~ and o are as in GSA. The paper only says that ABC is its model without decay, so everything
    else is as in GSA: swish on q, k and v, swish and RMSNorm on the output, one projection
    (`in_proj` with the rows of Wq, Wk, Wv and Wφ in this order, by head), no bias.
    """  # noqa: D415

    state_type = ABCState

    def __init__(self, config: ABCConfig, d_model: int) -> None:
        super().__init__()
        H, M = config.num_heads, config.num_slots
        check_size("ABCConfig", "num_heads", H)
        check_size("ABCConfig", "num_slots", M)
        self.head_dim = head_width(d_model, H)
        if config.reading not in ("text", "code"):
            raise ValueError(f'ABCConfig: reading must be "text" or "code", got {config.reading!r}')
        self.config, self.d_model = config, d_model
        self.widths = (d_model, d_model, d_model, H * M)
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.norm = nn.RMSNorm(d_model, eps=NORM_EPS)
        self.out_proj = Linear(d_model, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        state: ABCState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, ABCState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        q, k, v, logits = self._project(x)
        before, z = running_lse(logits, None if state is None else state.z, cu_seqlens)
        g, s = self._strengths(logits, before, z)
        k, v = skip_padding(lengths, k, v)
        g, s = (part if part is None else skip_padding(lengths, part)[0] for part in (g, s))
        memory = None if state is None else GSAState(state.k, state.v)
        out, after = chunk_gsa(q, k, v, g, s, initial_state=memory, cu_seqlens=cu_seqlens)
        y = self._output(out)
        if state is None:
            return y, None
        borders = torch.cat([state.z[:, None], z], dim=1)
        if lengths is None:
            return y, ABCState(*after, borders[:, -1])
        seen = lengths[:, None, None, None].expand(-1, 1, *z.shape[2:])
        return y, ABCState(*after, borders.gather(1, seen)[:, 0])

    def step(self, x: Tensor, state: ABCState) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer."""
        self.check_step(x, state)
        q, k, v, logits = self._project(x)
        before, z = running_lse(logits, state.z, None)
        g, s = (part if part is None else part[:, 0] for part in self._strengths(logits, before, z))
        out = step_gsa_(q[:, 0], k[:, 0], v[:, 0], g, s, GSAState(state.k, state.v))
        state.z.copy_(z[:, 0])
        return self._output(out[:, None])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q, k, v (B, T, H, D) and the logits l (B, T, H, M), in float32."""
        parts = self.in_proj(x).split(self.widths, dim=-1)
        *qkv, logits = (part.unflatten(-1, (self.config.num_heads, -1)) for part in parts)
        q, k, v = (F.silu(part) for part in qkv)
        return q, k, v, logits.to(accumulation_dtype(logits.dtype))

    def _strengths(
        self, logits: Tensor, before: Tensor, z: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return g and s of the op, (B, T, H, M) or None."""
        if self.config.reading == "text":
            return None, torch.exp(logits - z)
        # exp(z[t-1] - z[t]) = sigmoid(z[t-1] - l[t]). z[t-1] - z[t] itself is a difference of
        # nearly equal sums, which would lose the contribution of a late token.
        return F.logsigmoid(before - logits).clamp(min=MIN_LOG_GATE), None

    def _output(self, out: Tensor) -> Tensor:
        return self.out_proj(gated_norm(out.flatten(2), self.norm.weight, NORM_EPS))

    def init_state(self, batch: int) -> ABCState:
        """Return the state before the first token: empty memories and empty sums."""
        weight = self.out_proj.weight
        dtype = accumulation_dtype(weight.dtype)
        shape = (batch, self.config.num_heads, self.config.num_slots)
        k, v = (weight.new_zeros(*shape, self.head_dim, dtype=dtype) for _ in range(2))
        return ABCState(k, v, weight.new_full(shape, float("-inf"), dtype=dtype))

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of state of one sequence: 2 M C + H M values, for any length."""
        values = self.config.num_slots * (2 * self.d_model + self.config.num_heads)
        return values * accumulation_dtype(self.out_proj.weight.dtype).itemsize

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token: projections, the update of the state, 4 M C to read it.

        Each number of the state is updated by h + s x ("text") or α h + s x ("code"). Activations,
        the running sum, softmax and norm are not counted.
        """
        MC = self.config.num_slots * self.d_model
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        update = 2 if self.config.reading == "text" else 3
        return 2 * weights + update * 2 * MC + 4 * MC


def running_lse(
    logits: Tensor, z0: Tensor | None = None, cu_seqlens: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return z[t-1] and z[t] for every token, z[t] = log Σ_{j≤t} exp(logits[j]). Differentiable.

    Args:
        logits: (B, T, ...).
        z0: (B, ...), z before the first token; None: -inf, an empty sum.
        cu_seqlens: (S + 1,) borders of packed sequences; at each the sum starts again from -inf.
    """
    if cu_seqlens is not None:
        return _packed_lse(logits, cu_seqlens)
    z0 = torch.full_like(logits[:, :1], float("-inf")) if z0 is None else z0[:, None]
    z = torch.logaddexp(z0, torch.logcumsumexp(logits, dim=1))
    return torch.cat([z0, z[:, :-1]], dim=1)[:, : z.shape[1]], z


def _packed_lse(logits: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Do what `running_lse` does for packed sequences, by doubling.

    After the step of width d, each z is the sum over the last 2d tokens of its sequence. Taking
    differences of one sum over the whole row would lose digits, and a loop over the sequences would
    have to wait for the GPU to read their borders.
    """
    T = logits.shape[1]
    place = sequence_positions(T, cu_seqlens).to(logits.device)
    place = place.view(1, T, *[1] * (logits.ndim - 2))
    z, width = logits, 1
    while width < T:
        earlier = z.roll(width, dims=1)
        z = torch.where(place >= width, torch.logaddexp(z, earlier), z)
        width *= 2
    return torch.where(place > 0, z.roll(1, dims=1), float("-inf")), z
