"""What the mixers of the family share: heads, one projection, feature maps, norms and states."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.nn.norm import is_plain_norm
from mezzo_core.ops.checks import check_number, check_size
from mezzo_core.ops.precision import accumulation_dtype
from torch import Tensor, nn

from mezzo_gsa.ops.norms import gated_norm

if TYPE_CHECKING:
    from mezzo_gsa.gated_abc import GatedABCConfig
    from mezzo_gsa.gla import GLAConfig
    from mezzo_gsa.retnet import RetNetConfig

FeatureMap = Literal["relu"]


class Heads(NamedTuple):
    """Numbers and widths of a mixer's heads."""

    HQ: int
    H: int
    K: int
    V: int

    @property
    def widths(self) -> tuple[int, int, int]:
        """The channels of all queries, keys and values."""
        return self.HQ * self.K, self.H * self.K, self.H * self.V

    def split(self, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """Split one projection, without copies.

        Args:
            x: (..., W), queries, keys and values side by side, and what else a mixer projects.
            widths: their channels, W in sum; the first three are `self.widths`.

        Returns:
            q (..., HQ, K), k (..., H, K), v (..., H, V), and the others as they are.
        """
        q, k, v, *others = x.split(list(widths), dim=-1)
        shapes = ((self.HQ, self.K), (self.H, self.K), (self.H, self.V))
        heads = [part.unflatten(-1, s) for part, s in zip((q, k, v), shapes, strict=True)]
        return [*heads, *others]


def plan_heads(
    config: "GLAConfig | GatedABCConfig | RetNetConfig",
    d_model: int,
    num_kv_heads: int | None = None,
) -> Heads:
    """Return the heads of a mixer; without `num_kv_heads` queries share no keys and values.

    Raises:
        TypeError: if a number has a wrong type; the message names the configuration.
        ValueError: if a number is not positive, or heads or channels do not divide.
    """
    kind, num_heads = type(config).__name__, config.num_heads
    H = num_heads if num_kv_heads is None else num_kv_heads
    for name, size in (("num_heads", num_heads), ("num_kv_heads", H), ("d_model", d_model)):
        check_size(kind, name, size)
    if num_heads % H:
        raise ValueError(f"{kind}: num_kv_heads must divide num_heads = {num_heads}, got {H}")
    widths = []
    for name, expand in (("expand_k", config.expand_k), ("expand_v", config.expand_v)):
        check_number(kind, name, expand, positive=True)
        width = round(d_model * expand / num_heads, 9)  # `expand` may be a rounded ratio
        if not 1 <= width < 2**63 or width != int(width):
            raise ValueError(
                f"{kind}: {name} must give each head, of num_heads = {num_heads}, a whole number "
                f"of channels of d_model = {d_model}, got {expand}: {width:g} channels a head"
            )
        widths.append(int(width))
    return Heads(num_heads, H, *widths)


def apply_feature_map(x: Tensor, feature_map: FeatureMap | None) -> Tensor:
    """Apply the feature map of a linear attention to queries or keys."""
    return x if feature_map is None else F.relu(x)


def norm_and_gate(norm: nn.Module, eps: float, out: Tensor, z: Tensor | None) -> Tensor:
    """Return RMSNorm(o) ⊙ swish(z), (..., HQ·V), from the heads' outputs o (..., HQ, V).

    Args:
        norm: over V channels; if it is a plain RMSNorm, one kernel computes all.
        eps: of a plain RMSNorm.
        out: o.
        z: (..., HQ·V), logits of the output gate; None: no gate.
    """
    if z is not None and is_plain_norm(norm, eps):
        z = z.unflatten(-1, out.shape[-2:])
        return gated_norm(out, cast(Tensor, norm.weight), eps, z=z).flatten(-2)
    y = norm(out).flatten(-2)
    return y if z is None else y * F.silu(z)


def swish_and_norm(norm: nn.Module | None, eps: float, out: Tensor) -> Tensor:
    """Return RMSNorm(swish(o)), (..., HQ·V), from the heads' outputs o (..., HQ, V).

    `norm` is over all channels, None for swish alone; `eps` is that of a plain RMSNorm.
    """
    out = out.flatten(-2)
    if norm is None or is_plain_norm(norm, eps):
        return gated_norm(out, None if norm is None else cast(Tensor, norm.weight), eps)
    return norm(F.silu(out))


def state_zeros(weight: Tensor, *shape: int) -> Tensor:
    """Return zeros for the state of a mixer with this weight, in the precision of its sums."""
    return torch.zeros(shape, dtype=accumulation_dtype(weight.dtype), device=weight.device)


class AbstractConvertible(AbstractMixer):
    """A mixer that can start with the weights of softmax attention (`mezzo_gsa.convert`).

    The first rows of `in_proj` are its Wq, Wk and Wv, as `widths` says, and `out_proj` is its Wo.
    """

    in_proj: nn.Linear
    out_proj: nn.Linear
    widths: Sequence[int]

    @torch.no_grad()
    def take_attention(self, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> None:
        """Copy the matrices of softmax attention with as many heads.

        Raises:
            ValueError: if the mixer's matrices have other shapes.
        """
        q, k, v, *_ = self.in_proj.weight.split(list(self.widths))
        pairs = {"Wq": (q, wq), "Wk": (k, wk), "Wv": (v, wv), "Wo": (self.out_proj.weight, wo)}
        for name, (own, weight) in pairs.items():
            if own.shape != weight.shape:
                raise ValueError(f"has no {name} of shape {tuple(weight.shape)}")
        for own, weight in pairs.values():
            own.copy_(weight)
