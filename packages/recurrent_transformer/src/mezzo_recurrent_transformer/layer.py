"""Describes a layer of the Recurrent Transformer or of its Transformer, and draws its weights."""

from dataclasses import dataclass
from typing import Any

from mezzo_core.config_json import check_fields
from mezzo_core.nn.mlp import GELUMLP
from mezzo_core.nn.norm import NormKind
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.positions import AlibiFormula
from torch import nn


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
            paper has 1 / sqrt(number of layers), which `scaled` and `RecurrentStackConfig` set.
        init_layer: l, the layer's index from 0, to draw its weights as the released code does, with
            matrices that end a branch smaller by 1 / sqrt(2 (l + 1)). None for the initialization
            of core.
    """

    head_dim: int = 64
    hidden: int | None = None
    norm: NormKind = "rms"
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

    def check_width(self, d_model: int) -> None:
        """Raise a ValueError if head_dim does not divide the model's width."""
        check_size(type(self).__name__, "d_model", d_model)
        if d_model % self.head_dim:
            raise ValueError(f"head_dim must divide d_model, got {self.head_dim} and {d_model}")


def init_as_released(attention: Any, mlp: GELUMLP, layer: int) -> None:
    """Draw the matrices of layer l = 0, 1, ... as the released code does.

    wo and down, which end a branch, start smaller by 1 / sqrt(2 (l + 1)). `attention` is the module
    with wq, wk, wv and wo.
    """
    for matrix in (attention.wq, attention.wk, attention.wv, attention.wo, mlp.up, mlp.down):
        std = matrix.in_features**-0.5
        if matrix in (attention.wo, mlp.down):
            std *= (2 * (layer + 1)) ** -0.5
        nn.init.trunc_normal_(matrix.weight, std=std, a=-3 * std, b=3 * std)
