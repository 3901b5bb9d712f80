"""What one layer of the Recurrent Transformer and one of its Transformer have in common.

Both have the same weights under the same names, the same initialization and the same kind of state,
so that the two are compared at equal weights and a checkpoint of one can be read as the other.
"""

from dataclasses import dataclass
from typing import Any, get_args

import torch
from mezzo_core.config_json import check_fields
from mezzo_core.nn import AbstractBlock, MLPConfig
from mezzo_core.nn.attention import KVCache, check_cache, check_room
from mezzo_core.nn.linear import Linear
from mezzo_core.nn.norm import RMSNorm
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.precision import accumulation_dtype
from mezzo_core.positions import AlibiFormula, alibi_slopes
from torch import Tensor, nn

from mezzo_recurrent_transformer.ops.recurrent_layers import Norm


@dataclass(frozen=True)
class LayerConfig:
    """Describes a layer: attention and an MLP, behind norms and residuals.

    Attributes:
        head_dim: width D of a head.
        hidden: width F of the MLP; None for 4C.
        norm: "rms" as the paper says, "layer" (with weight, without bias) as its released code has,
            or "none".
        norm_eps: epsilon of all norms.
        alibi: formula of the ALiBi slopes, or None for no positions at all. "olmo" is the paper's;
            the two differ if the number of heads is no power of two.
        residual_scale: r, by which attention and MLP are multiplied before they are added. The
            paper has 1 / sqrt(number of layers); `residual_scales` and `RecurrentStackConfig` set
            it.
        init_layer: l, the layer's index from 0, to draw its weights as the released code does, with
            matrices that end a branch smaller by 1 / sqrt(2 (l + 1)). None for the initialization
            of core.
    """

    head_dim: int = 64
    hidden: int | None = None
    norm: Norm = "rms"
    norm_eps: float = 1e-5
    alibi: AlibiFormula | None = "olmo"
    residual_scale: float = 1.0
    init_layer: int | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        name = type(self).__name__
        check_size(name, "head_dim", self.head_dim)
        check_number(name, "norm_eps", self.norm_eps, positive=True)
        check_number(name, "residual_scale", self.residual_scale, positive=True)
        if self.hidden is not None:
            check_size(name, "hidden", self.hidden)
        if self.init_layer is not None:
            check_size(name, "init_layer", self.init_layer, 0)
        if self.norm not in get_args(Norm):
            raise ValueError(f"norm must be one of {get_args(Norm)}, got {self.norm!r}")
        if self.alibi is not None and self.alibi not in get_args(AlibiFormula):
            raise ValueError(f"alibi must be one of {get_args(AlibiFormula)}, got {self.alibi!r}")


class AbstractLayer(AbstractBlock):
    """The weights of a layer, and what follows from them. Its state is a KV cache."""

    state_type = KVCache

    def __init__(self, d_model: int, config: LayerConfig) -> None:
        super().__init__()
        check_size(type(config).__name__, "d_model", d_model)
        if d_model % config.head_dim:
            raise ValueError(f"head_dim must divide d_model, got {config.head_dim} and {d_model}")
        self.d_model = d_model
        self.config = config
        self.num_heads = d_model // config.head_dim
        self.attention_norm = self._norm()
        self.wq, self.wk, self.wv, self.wo = (
            Linear(d_model, d_model, bias=False) for _ in range(4)
        )
        self.q_norm, self.k_norm = self._norm(), self._norm()
        self.mlp_norm = self._norm()
        self.mlp = MLPConfig("gelu", config.hidden).build(d_model)

    def init_own_weights(self) -> None:
        """Draw the weights as the released code does, if `init_layer` asks for it."""
        layer = self.config.init_layer
        if layer is None:
            return
        for matrix in (self.wq, self.wk, self.wv, self.wo, self.mlp.up, self.mlp.down):
            std = matrix.in_features**-0.5
            if matrix in (self.wo, self.mlp.down):
                std *= (2 * (layer + 1)) ** -0.5
            nn.init.trunc_normal_(matrix.weight, std=std, a=-3 * std, b=3 * std)

    def init_state(self, batch: int) -> KVCache:
        """Return an empty cache for `batch` rows."""
        dtype, device = self.wk.weight.dtype, self.wk.weight.device
        shape = (batch, 0, self.num_heads, self.config.head_dim)
        empty = torch.zeros(shape, dtype=dtype, device=device)
        return KVCache(empty, empty, torch.zeros(batch, dtype=torch.int64, device=device))

    def check_step(self, x: Tensor, state: KVCache) -> None:
        """Check the arguments of `step`, the room in the cache included."""
        super().check_step(x, state)
        check_room(state)

    def reserve(self, state: KVCache, num_tokens: int) -> KVCache:
        """Return a copy of the cache with slots for `num_tokens` more tokens of every row."""
        self.check_reserve(state, num_tokens)
        check_cache(state)
        longest = int(state.lengths.max()) if state.lengths.numel() else 0
        kept = min(longest, state.k.shape[1])
        k, v = (
            x.new_zeros(x.shape[0], longest + num_tokens, *x.shape[2:]) for x in (state.k, state.v)
        )
        k[:, :kept], v[:, :kept] = state.k[:, :kept], state.v[:, :kept]
        return KVCache(k, v, state.lengths.clone())

    def state_bytes(self, num_tokens: int) -> int:
        """Return the bytes of keys and values of one sequence."""
        return 2 * num_tokens * self.d_model * self.wk.weight.element_size()

    def slopes(self) -> Tensor:
        """Return the ALiBi slopes (H,), zeros without ALiBi, on the device of the weights."""
        device, dtype = self.wk.weight.device, accumulation_dtype(self.wk.weight.dtype)
        if self.config.alibi is None:
            return torch.zeros(self.num_heads, device=device, dtype=dtype)
        return alibi_slopes(self.num_heads, self.config.alibi, device=device, dtype=dtype)

    def _norm(self) -> nn.Module:
        if self.config.norm == "none":
            return nn.Identity()
        if self.config.norm == "layer":
            return nn.LayerNorm(self.d_model, self.config.norm_eps, bias=False)
        return RMSNorm(self.d_model, self.config.norm_eps)

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v (B, T, H, D) of normalized x."""
        heads = (self.num_heads, self.config.head_dim)
        q, k = self.q_norm(self.wq(x)), self.k_norm(self.wk(x))
        return q.unflatten(-1, heads), k.unflatten(-1, heads), self.wv(x).unflatten(-1, heads)

    def _finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Add attention (B, T, C) and the MLP to the residual stream."""
        r = self.config.residual_scale
        h = x + r * self.wo(attended)
        return h + r * self.mlp(self.mlp_norm(h))


def residual_scales(num_layers: int) -> float:
    """Return r = 1 / sqrt(number of layers), the paper's scale of each residual branch."""
    return num_layers**-0.5


def weight_flops(layer: AbstractLayer, extra: Any = ()) -> float:
    """Return 2 FLOPs for each weight of the layer's matrices, and of those in `extra` once more."""
    matrices = [part for part in layer.modules() if isinstance(part, nn.Linear)]
    return 2.0 * sum(matrix.weight.numel() for matrix in (*matrices, *extra))
