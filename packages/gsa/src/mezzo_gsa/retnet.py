"""RetNet's retention, the mixer: linear attention with RoPE and a fixed decay for each head."""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from mezzo_core.config_json import check_fields
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.norm import RMSNorm, is_plain_norm
from mezzo_core.ops.checks import check_number
from mezzo_core.ops.padding import without_padding
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.ops.tables import kept
from mezzo_core.positions import (
    RopeScaling,
    apply_rope,
    rope_angles,
    scaling_numbers,
    sequence_positions,
)
from torch import Tensor, nn

from mezzo_gsa.heads import (
    AbstractConvertible,
    FeatureMap,
    apply_feature_map,
    norm_and_gate,
    plan_heads,
    state_zeros,
)
from mezzo_gsa.ops import LayerForm, chunk_gla, step_gla_layer_
from mezzo_gsa.ops.gates import skip_padding

Norm = Literal["rms", "group"]


@dataclass(frozen=True)
class RetNetConfig:
    """Multi-scale retention (arXiv:2307.08621); the defaults are the paper's baseline.

    T2R uses `expand_v=1.0, feature_map="relu", output_gate=False`. SUPRA (arXiv:2405.06640) has
    `qk_map=True, norm="group"` as well.
    """

    num_heads: int = 4
    num_kv_heads: int | None = None
    """Heads of keys and values, shared by groups of query heads; None: as many as query heads."""
    expand_k: float = 1.0
    """Width of all queries, in units of d_model."""
    expand_v: float = 2.0
    """Width of all heads' outputs, in units of d_model."""
    feature_map: FeatureMap | None = None
    """Applied to queries and keys, before RoPE."""
    output_gate: bool = True
    """Whether the normalized output is multiplied by a swish gate."""
    rope_base: float = 10_000.0
    qk_map: bool = False
    """Whether queries and keys pass a learned matrix and bias before the feature map."""
    norm: Norm = "rms"
    """Norm of each head's output; "group" is GroupNorm, which subtracts the mean and has a bias."""
    norm_eps: float = 1e-6
    rope_scaling: RopeScaling | None = None
    """Makes some pairs of RoPE turn more slowly."""

    def build(self, d_model: int) -> "RetNet":
        """Build the mixer.

        Raises:
            ValueError: if a field has a wrong type or value, the widths do not divide, or a head's
                keys have an odd width.
        """
        return RetNet(self, d_model)


class RetNetState(NamedTuple):
    """The decoding state."""

    h: Tensor
    """(B, HQ, K, V) float32: a memory for each query head, because each has its own decay."""
    lengths: Tensor
    """(B,) int64: the tokens that each row has seen."""


class RetNet(AbstractConvertible):
    """The RetNet mixer: y = (RMSNorm(retention) ⊙ swish(x Wz)) Wo.

    Head h = 0, 1, ... decays by γ = 1 - 2^(-5-h) at each token. Queries and keys have RoPE, the
    scale is K^-1/2, and the norm is over each head.

    The rows of `in_proj.weight` are those of Wq, Wk, Wv and Wz (if there is an output gate), by
    head; `out_proj` is Wo. `qk_map`, if there is one, is the matrix and bias of SUPRA's feature map
    relu(x W + b), one for the queries and keys of all heads. It starts as the identity.

    The norm's input grows with the cube of x. In float16 it overflows where x is about 15 times as
    large as a block's norm makes it.
    """

    state_type = RetNetState

    def __init__(self, config: RetNetConfig, d_model: int) -> None:
        super().__init__()
        check_fields(config)
        for name in ("rope_base", "norm_eps"):
            check_number("RetNetConfig", name, getattr(config, name), positive=True)
        self.config, self.d_model = config, d_model
        HQ, _, K, V = self.heads = plan_heads(config, d_model, config.num_kv_heads)
        if K % 2:
            raise ValueError(f"RoPE needs keys of an even width, got {K} channels a head")
        self.form = LayerForm(
            scale=K**-0.5,
            feature_map=config.feature_map,
            rope_base=config.rope_base,
            rope_scaling=scaling_numbers("RetNetConfig", config.rope_scaling),
            norm_eps=config.norm_eps,
        )
        self.widths = (*self.heads.widths, HQ * V if config.output_gate else 0)
        self.in_proj = Linear(d_model, sum(self.widths), bias=False)
        self.qk_map = Linear(K, K) if config.qk_map else None
        self.norm = (
            nn.GroupNorm(HQ, HQ * V, eps=config.norm_eps)
            if config.norm == "group"
            else RMSNorm(V, eps=config.norm_eps)
        )
        self.out_proj = Linear(HQ * V, d_model, bias=False)

    def init_own_weights(self) -> None:
        """Let `qk_map` start as the identity."""
        if self.qk_map is not None:
            nn.init.eye_(self.qk_map.weight)

    def forward(
        self,
        x: Tensor,
        state: RetNetState | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        lengths: Tensor | None = None,
    ) -> tuple[Tensor, RetNetState | None]:
        """Mix (B, T, C) along time; see AbstractMixer."""
        self.check_input(x, state, cu_seqlens, lengths)
        T = x.shape[1]
        HQ, H, K, _ = self.heads
        start = None if state is None else state.lengths
        positions = sequence_positions(T, cu_seqlens, start, x.device)
        dtype = accumulation_dtype(self.out_proj.weight.dtype)
        rope = self.config.rope_base, self.config.rope_scaling
        angles = rope_angles(positions, K, *rope, dtype=dtype)
        q, k, v, z = self._project(without_padding(x, lengths))
        q, k = (
            apply_rope(apply_feature_map(part, self.config.feature_map), *angles) for part in (q, k)
        )
        if H < HQ:
            k, v = (part.repeat_interleave(HQ // H, dim=2) for part in (k, v))
        g = log_decay(HQ, x.device, dtype)
        k, v, g = skip_padding(lengths, k, v, g.expand(*x.shape[:2], HQ)[..., None])
        out, h = chunk_gla(
            q, k, v, g, scale=self.form.scale, initial_state=None if state is None else state.h,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip
        y = self._normed(out, z)
        if state is not None:
            state = RetNetState(h, state.lengths + (T if lengths is None else lengths))
        return self.out_proj(y), state

    def step(self, x: Tensor, state: RetNetState) -> Tensor:
        """Decode one token of every row, overwriting the state in place; see AbstractMixer."""
        if not is_plain_norm(self.norm, self.config.norm_eps):
            return super().step(x, state)
        self.check_step(x, state)
        HQ, H, _, _ = self.heads
        q, k, v, z = self._project(x[:, 0])
        if H < HQ:
            k, v = (part.repeat_interleave(HQ // H, dim=1) for part in (k, v))
        y = step_gla_layer_(
            q,
            k,
            v,
            _decay_table(HQ, x.device, state.h.dtype).expand(x.shape[0], HQ)[..., None],
            state.h,
            self.form,
            norm_weight=self.norm.weight,
            z=z,
            places=state.lengths,
        )
        state.lengths.add_(1)
        return self.out_proj(y[:, None])

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Return q, k, v by head, and z (..., HQ·V) or None."""
        q, k, v, z = self.heads.split(self.in_proj(x), self.widths)
        if self.qk_map is not None:
            q, k = self.qk_map(q), self.qk_map(k)
        return q, k, v, z if self.config.output_gate else None

    def _normed(self, out: Tensor, z: Tensor | None) -> Tensor:
        """Norm each head of (B, T, HQ, V), and return (B, T, HQ V), times the output gate."""
        if self.config.norm == "rms":
            return norm_and_gate(self.norm, self.config.norm_eps, out, z)
        rows = out.flatten(2)
        y = self.norm(rows.flatten(0, 1)).view_as(rows)
        return y if z is None else y * F.silu(z)

    def init_state(self, batch: int) -> RetNetState:
        """Return the state before the first token."""
        HQ, _, K, V = self.heads
        h = state_zeros(self.out_proj.weight, batch, HQ, K, V)
        return RetNetState(h, torch.zeros(batch, dtype=torch.int64, device=h.device))

    def flops_per_token(self, num_tokens: int) -> float:
        """Return the forward FLOPs a token of the recurrent form.

        Two for each weight (of `qk_map`: for each head of queries and of keys); 5 K V a head to
        decay, write and read its state; the products of the output gate. RoPE, norms and
        activations are not counted.
        """
        HQ, H, K, V = self.heads
        weights = sum(weight.numel() for weight in self.parameters() if weight.ndim == 2)
        if self.qk_map is not None:
            weights += (HQ + H - 1) * K * K
        gate = HQ * V if self.config.output_gate else 0
        return 2 * weights + 5 * HQ * K * V + gate


def log_decay(num_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return log γ of each head, (HQ,), computed without γ, which would lose digits near one."""
    heads = torch.arange(num_heads, device=device, dtype=dtype)
    return torch.log1p(-torch.exp2(-5 - heads))


def _decay_table(num_heads: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return `log_decay` for decoding steps, in a tensor that captured graphs may go on reading.

    Not for training: a table made in inference mode could not be saved for a backward.
    """
    # Where ops are traced, as by torch.export, a table may be fake: real steps must not find it.
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return log_decay(num_heads, device, dtype)
    return _kept_decay(num_heads, device=device, dtype=dtype)


_kept_decay = kept(log_decay)
