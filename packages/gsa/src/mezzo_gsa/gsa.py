"""GSA, the mixer: projections around the op (the paper's section 3.3)."""

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn.linear import Linear, is_plain, takes_decode_linear
from mezzo_core.nn.norm import is_plain_norm
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.decode_linear import decode_linear
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor, nn
from torch.nn import functional as F

from mezzo_gsa.heads import AbstractConvertible, state_zeros, swish_and_norm
from mezzo_gsa.ops import (
    Between,
    GSAState,
    chunk_gsa,
    chunk_gsa_projected,
    recurrent_gsa_projected,
    step_gsa_projected_,
)
from mezzo_gsa.ops.gates import log_gate, skip_padding
from mezzo_gsa.ops.gsa.step import unsupported_step

SPANS = (2.0, 2048.0)
"""The shortest and the longest initial memory, in tokens: the default of constant gates, and that
of all gates in the recipes `gsa_spread`."""

MAX_DAMPING = 1e30
"""The initial logits for `gate_spans` are about as large as the damping, and must be finite."""

_OPEN = 1e4
"""The logit of a gate that forgets nothing and writes nothing: exp(-1e4) is zero in any dtype."""

MAX_SCALE = 1e30
"""The logits of the slots must be finite in float32."""


FEW_TOKENS = 64
"""Up to this many tokens after a state run one after another, if nothing needs a gradient."""


@dataclass(frozen=True)
class GSAConfig:
    """Gated slot attention. The defaults are the paper's 1.3B model (2.7B has 5 heads)."""

    num_heads: int = 4
    num_kv_heads: int | None = None
    """Heads of keys, values and gates. Groups of num_heads / num_kv_heads neighbouring query heads
    share one. None: as many as query heads."""
    num_slots: int = 64
    """M, the slots of a head's memory."""
    damping: float = 8.0
    """Forget gates are sigmoid(logits)^(1 / damping), so that they start near one."""
    scale: float | None = 1.0
    """Multiplies K~ q; None: D^-1/2, for heads of D channels, as in softmax attention."""
    gate: Literal["token", "constant"] = "token"
    """Forget gates that depend on the token, or the ablation with data-independent decay: a learned
    constant for each head and slot."""
    gate_spans: tuple[float, float] | None = None
    """The shortest and the longest memory, in tokens, with which the slots of a head start; the
    others are between them in geometric steps. `in_proj` then has a bias. None: as in the paper,
    there is no bias, and all slots start with a memory of 12 tokens (with damping 8); but constant
    gates start with (2, 2048). We recommend (2, 2048) for all gates, although short memories mean
    steep gates, which cost the kernels a little speed."""
    between: Between = "softmax"
    """The function from K~ q to the slots' weights; all but softmax are the paper's ablation."""
    feature_map: Literal["swish", "none"] = "swish"
    """Applied to q, k and v."""
    output_norm: bool = True
    """RMSNorm after the output's swish."""
    norm_eps: float = 1e-5
    keep_states: bool = False
    """Save the memories at the chunks' borders for the backward: faster, but needs more memory."""
    head_dim: int | None = None
    """D; None: d_model / num_heads, so that the heads fill the width."""

    def build(self, d_model: int) -> "GSA":
        """Build the mixer.

        Raises:
            ValueError: if a field has a wrong type or value, or heads do not divide.
        """
        return GSA(self, d_model)


class GSA(AbstractConvertible):
    """The GSA mixer: y = RMSNorm(swish(o)) Wo, o from swish(x Wq), swish(x Wk), swish(x Wv), x Wα.

    The rows of `in_proj.weight`, with HQ heads of queries and H of keys and values, are HQ·D rows
    of Wq, H·D of Wk, H·D of Wv and, if gates depend on the token, H·M of Wα. Each is ordered by
    head, then by channel or slot. `out_proj` is Wo, and `norm` has a weight for each of the HQ·D
    channels. Only `in_proj` can have a bias, with `gate_spans`.

    Constant gates have `gate_logits` (H·M) instead of Wα. These always start with different
    memories: slots of a head that start equal would stay equal, since nothing else distinguishes
    them.
    """

    state_type = GSAState

    def __init__(self, config: GSAConfig, d_model: int) -> None:
        super().__init__()
        _check(config)
        HQ, M = config.num_heads, config.num_slots
        H = HQ if config.num_kv_heads is None else config.num_kv_heads
        D = head_width(d_model, HQ) if config.head_dim is None else config.head_dim
        if HQ % H:
            raise ValueError(f"num_kv_heads must divide the {HQ} heads, got {H}")
        self.config, self.d_model, self.num_kv_heads, self.head_dim = config, d_model, H, D
        self.scale = D**-0.5 if config.scale is None else float(config.scale)
        by_token = config.gate == "token"
        self.widths = (HQ * D, H * D, H * D, H * M if by_token else 0)
        bias = by_token and config.gate_spans is not None
        self.in_proj = Linear(d_model, sum(self.widths), bias=bias)
        # One-dimensional, so without weight decay, which would pull constant gates to 0.5^(1/τ).
        self.gate_logits = None if by_token else nn.Parameter(torch.empty(H * M))
        self.norm = nn.RMSNorm(HQ * D, eps=config.norm_eps) if config.output_norm else None
        self.out_proj = Linear(HQ * D, d_model, bias=False)
        self.init_own_weights()

    @torch.no_grad()
    def init_own_weights(self) -> None:
        """Start the slots of each head with memories of `gate_spans` tokens: α = 1 - 1/span."""
        start: Tensor | None = self.gate_logits
        if start is None and self.in_proj.bias is not None:
            start = self.in_proj.bias[-self.widths[-1] :]
        if start is None:
            return
        M, (short, long) = self.config.num_slots, map(math.log, self.config.gate_spans or SPANS)
        spans = torch.linspace(short, long, M, dtype=torch.float64).exp()
        power = float(self.config.damping) * torch.log1p(-1 / spans)  # log of α^τ = sigmoid(logit)
        logits = power - torch.log(-torch.expm1(power))
        start.copy_(logits.repeat(self.num_kv_heads))

    def forward(
        self,
        x: Tensor,
        state: GSAState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, GSAState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        if state is not None and cu_seqlens is None and self._are_few(x, state):
            return self._one_after_another(x, state, lengths)
        qkvg = self.in_proj(without_padding(x, lengths))
        op: dict[str, Any] = {
            "scale": self.scale,
            "between": self.config.between,
            "initial_state": state,
            "cu_seqlens": cu_seqlens,
            "keep_states": self.config.keep_states,
        }
        if self.gate_logits is None:
            if lengths is not None:
                *qkv, logits = qkvg.split(self.widths, dim=-1)
                (logits,) = skip_padding(lengths, logits[..., None], fill=_OPEN)
                qkvg = torch.cat([*qkv, logits[..., 0]], -1)
            out, after = chunk_gsa_projected(
                qkvg,
                num_heads=self.config.num_heads,
                num_kv_heads=self.num_kv_heads,
                num_slots=self.config.num_slots,
                damping=self.config.damping,
                swish=self.config.feature_map == "swish",
                **op,
            )
        else:
            q, k, v, g = self._split(qkvg)
            out, after = chunk_gsa(q, *skip_padding(lengths, k, v, g), **op)
        y = swish_and_norm(self.norm, self.config.norm_eps, out)
        return self.out_proj(y), None if state is None else after

    def look_ahead(
        self, x: Tensor, state: GSAState, lengths: Tensor, certain: Tensor
    ) -> tuple[Tensor, GSAState]:
        """Run over tokens of which the first are certain; see AbstractMixer."""
        self.check_input(x, state, None, lengths)
        if self._are_few(x, state):
            return self._one_after_another(x, state, lengths, certain)
        return super().look_ahead(x, state, lengths, certain)

    def step(self, x: Tensor, state: GSAState) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer."""
        if self.norm is not None and not is_plain_norm(self.norm, self.config.norm_eps):
            return super().step(x, state)
        self.check_step(x, state)
        config, out_proj = self.config, self.out_proj
        weight = None if self.norm is None else self.norm.weight
        # If the output projection takes `decode_linear`, its kernel also computes the norm, which
        # saves a launch.
        norm_later = weight is not None and is_plain(out_proj) and takes_decode_linear(out_proj, x)
        form = self._step_form()
        if norm_later:
            form |= {"norm_weight": None, "out_dtype": accumulation_dtype(x.dtype)}
        y = step_gsa_projected_(self.in_proj(x).squeeze(1), state, **form)[:, None]
        if not norm_later:
            return out_proj(y)
        return decode_linear(
            y, out_proj.weight, out_proj.bias, norm_weight=weight, norm_eps=config.norm_eps
        )

    def _are_few(self, x: Tensor, state: GSAState) -> bool:
        """Tell whether kernels read these tokens one after another, and not by chunks."""
        return (
            x.is_cuda
            and 0 < x.shape[1] <= FEW_TOKENS
            and not torch.is_grad_enabled()
            and (self.norm is None or is_plain_norm(self.norm, self.config.norm_eps))
            and all(part.dtype == torch.float32 for part in state)
            and unsupported_step(x, state) is None
        )

    def _one_after_another(
        self, x: Tensor, state: GSAState, lengths: Tensor | None, certain: Tensor | None = None
    ) -> tuple[Tensor, GSAState]:
        y, after = recurrent_gsa_projected(
            self.in_proj(x), state, lengths=lengths, certain=certain, **self._step_form()
        )
        return self.out_proj(y), after

    def _step_form(self) -> dict[str, Any]:
        """Return what the ops of decoding take besides the projection and the state."""
        return {
            "num_heads": self.config.num_heads,
            "gate_logits": self.gate_logits,
            "damping": self.config.damping,
            "scale": self.scale,
            "norm_weight": None if self.norm is None else self.norm.weight,
            "norm_eps": self.config.norm_eps,
            "swish": self.config.feature_map == "swish",
            "between": self.config.between,
        }

    def _split(self, qkvg: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return q (B, T, HQ, D), k, v (B, T, H, D) and g (B, T, H, M), the log of the gates."""
        *qkv, logits = qkvg.split(self.widths, dim=-1)
        if self.config.feature_map == "swish":
            qkv = [F.silu(part) for part in qkv]
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv)
        if self.gate_logits is not None:
            logits = self.gate_logits.expand(*qkvg.shape[:2], -1)
        g = log_gate(logits, self.config.damping)
        return q, k, v, g.unflatten(-1, (self.num_kv_heads, -1))

    def init_state(self, batch: int) -> GSAState:
        """Return the state before the first token: empty memories."""
        shape = (batch, self.num_kv_heads, self.config.num_slots, self.head_dim)
        return GSAState(*(state_zeros(self.out_proj.weight, *shape) for _ in GSAState._fields))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token: projections, 3 for each number of the state, 4 M HQ D.

        Each number of the state is updated by α h + s x. Queries read K~ and V~ with 2 M HQ D each.
        Activations, gates, softmax, norm and the extra work of the form by chunks are not counted.
        """
        M, (q_width, kv_width, *_) = self.config.num_slots, self.widths
        weights = self.in_proj.weight.numel() + self.out_proj.weight.numel()
        return 2 * weights + 3 * 2 * M * kv_width + 4 * M * q_width


def head_width(d_model: int, num_heads: int) -> int:
    """Return D = C / num_heads, the channels of a head.

    Raises:
        TypeError: if `d_model` is not an int.
        ValueError: if D is not a whole number.
    """
    check_size("build", "d_model", d_model)
    if d_model % num_heads:
        raise ValueError(f"num_heads must divide d_model = {d_model}, got {num_heads}")
    return d_model // num_heads


def _check(config: GSAConfig) -> None:
    check_fields(config)
    for name in ("num_heads", "num_slots", "num_kv_heads", "head_dim"):
        if name in ("num_heads", "num_slots") or getattr(config, name) is not None:
            check_size("GSAConfig", name, getattr(config, name))
    for name in ("damping", "norm_eps"):
        check_number("GSAConfig", name, getattr(config, name), positive=True)
    if config.scale is not None:
        check_number("GSAConfig", "scale", config.scale)
        if abs(config.scale) > MAX_SCALE:
            raise ValueError(f"GSAConfig: scale must be within ±{MAX_SCALE}, got {config.scale}")
    if config.damping > MAX_DAMPING:
        raise ValueError(f"GSAConfig: damping must be at most {MAX_DAMPING}, got {config.damping}")
    spans = SPANS if config.gate_spans is None else config.gate_spans
    for span in spans:
        check_number("GSAConfig", "each of gate_spans", span)
    if not 1 < spans[0] <= spans[1]:
        raise ValueError(
            f"GSAConfig: gate_spans must be above 1, the shorter first, got {tuple(spans)}"
        )
