"""GLA, the mixer: gated linear attention, a baseline of the paper and a target of T2R."""

from dataclasses import dataclass
from typing import NamedTuple

from mezzo_core.config_json import check_fields
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.norm import RMSNorm, is_plain_norm
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.padding import without_padding
from torch import Tensor

from mezzo_gsa.heads import (
    AbstractConvertible,
    FeatureMap,
    apply_feature_map,
    norm_and_gate,
    plan_heads,
    state_zeros,
)
from mezzo_gsa.ops import LayerForm, chunk_gla, step_gla_layer_
from mezzo_gsa.ops.gates import log_gate, skip_padding


@dataclass(frozen=True)
class GLAConfig:
    """Gated linear attention (arXiv:2312.06635); the defaults are the paper's baseline.

    T2R uses `expand_k=1.0, feature_map="relu", output_gate=False`.
    """

    num_heads: int = 4
    num_kv_heads: int | None = None
    """Heads of keys, values and gates; None: as many as query heads."""
    expand_k: float = 0.5
    """Width of all queries, in units of d_model."""
    expand_v: float = 1.0
    """Width of all heads' outputs, in units of d_model."""
    gate_rank: int = 16
    """Rank of the forget gate's projection."""
    damping: float = 16.0
    """Divides the log of the forget gate; with larger values memories are longer."""
    feature_map: FeatureMap | None = None
    """Applied to queries and keys."""
    output_gate: bool = True
    """Whether the normalized output is multiplied by a swish gate."""
    norm_eps: float = 1e-6

    def build(self, d_model: int) -> "GLA":
        """Build the mixer.

        Raises:
            ValueError: if a field has a wrong type or value, or the widths do not divide.
        """
        return GLA(self, d_model)


class GLAState(NamedTuple):
    """The decoding state."""

    h: Tensor
    """(B, H, K, V) float32: the memory of each key-value head."""


class GLA(AbstractConvertible):
    """The GLA mixer: y = (RMSNorm(GLA(q, k, v, g)) ⊙ swish(x Wz)) Wo.

    q, k, v = x Wq, x Wk, x Wv, and g = logsigmoid(x W1 W2 + b) / damping. The scale is K^-1/2, and
    the norm is over each head.

    The rows of `in_proj.weight` are those of Wq, Wk, Wv, Wz (if there is an output gate) and W1, by
    head, so that a token takes one product with all of them. `g_proj` is W2 and b, `out_proj` Wo.

    The norm's input grows with the cube of x. In float16 it overflows where x is about 20 times as
    large as a block's norm makes it.
    """

    state_type = GLAState

    def __init__(self, config: GLAConfig, d_model: int) -> None:
        super().__init__()
        check_fields(config)
        check_size("GLAConfig", "gate_rank", config.gate_rank)
        for name in ("damping", "norm_eps"):
            check_number("GLAConfig", name, getattr(config, name), positive=True)
        self.config, self.d_model = config, d_model
        HQ, H, K, V = self.heads = plan_heads(config, d_model, config.num_kv_heads)
        self.form = LayerForm(
            scale=K**-0.5,
            feature_map=config.feature_map,
            damping=config.damping,
            norm_eps=config.norm_eps,
        )
        self.widths = (*self.heads.widths, HQ * V if config.output_gate else 0, config.gate_rank)
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.g_proj = Linear(config.gate_rank, H * K)
        self.norm = RMSNorm(V, eps=config.norm_eps)
        self.out_proj = Linear(HQ * V, d_model, bias=False)

    def forward(
        self,
        x: Tensor,
        state: GLAState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, GLAState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        q, k, v, z, logits = self._project(without_padding(x, lengths))
        q, k = (apply_feature_map(part, self.config.feature_map) for part in (q, k))
        k, v, g = skip_padding(lengths, k, v, log_gate(logits, self.config.damping))
        out, h = chunk_gla(
            q, k, v, g, scale=self.form.scale, initial_state=None if state is None else state.h,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        y = norm_and_gate(self.norm, self.config.norm_eps, out, z)
        return self.out_proj(y), None if state is None else GLAState(h)

    def step(self, x: Tensor, state: GLAState) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer."""
        if not is_plain_norm(self.norm, self.config.norm_eps):
            return super().step(x, state)
        self.check_step(x, state)
        q, k, v, z, logits = self._project(x[:, 0])
        y = step_gla_layer_(q, k, v, logits, state.h, self.form, norm_weight=self.norm.weight, z=z)
        return self.out_proj(y[:, None])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """Return q, k, v by head, z (..., HQ·V) or None, and the gate's logits (..., H, K)."""
        q, k, v, z, low = self.heads.split(self.in_proj(x), self.widths)
        logits = self.g_proj(low).unflatten(-1, (self.heads.H, self.heads.K))
        return q, k, v, z if self.config.output_gate else None, logits

    def init_state(self, batch: int) -> GLAState:
        """Return the state before the first token."""
        _, H, K, V = self.heads
        return GLAState(state_zeros(self.out_proj.weight, batch, H, K, V))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token of the recurrent form.

        Two for each weight; 3 K V a key-value head to decay and write its state; 2 K V a query head
        to read it; the products of the output gate. Norms, activations and biases are not counted.
        """
        HQ, H, K, V = self.heads
        weights = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        gate = HQ * V if self.config.output_gate else 0
        return 2 * weights + 3 * H * K * V + 2 * HQ * K * V + gate
