"""How a mixer of the family cuts its channels into heads."""

from typing import Literal, NamedTuple, get_args

import torch.nn.functional as F
from torch import Tensor

FeatureMap = Literal["relu"]


class Heads(NamedTuple):
    """Numbers and widths of a mixer's heads."""

    HQ: int
    H: int
    K: int
    V: int


def plan_heads(
    d_model: int, num_heads: int, num_kv_heads: int | None, expand_k: float, expand_v: float
) -> Heads:
    """Return the heads of a mixer whose queries are C expand_k wide, and its output C expand_v.

    Raises:
        ValueError: if a number of heads is not positive or does not divide what it should.
    """
    if num_heads < 1:
        raise ValueError(f"num_heads must be 1 or more, got {num_heads}")
    H = num_heads if num_kv_heads is None else num_kv_heads
    if H < 1 or num_heads % H:
        raise ValueError(f"num_kv_heads must divide num_heads = {num_heads}, got {H}")
    widths = []
    for name, expand in (("expand_k", expand_k), ("expand_v", expand_v)):
        width = d_model * expand / num_heads
        if width < 1 or width != int(width):
            raise ValueError(
                f"{name} must give each of the {num_heads} heads a whole number of the "
                f"{d_model} channels, got {expand}: {width:g} channels a head"
            )
        widths.append(int(width))
    return Heads(num_heads, H, *widths)


def check_feature_map(feature_map: str | None) -> None:
    """Raise a ValueError if there is no such feature map."""
    if feature_map is not None and feature_map not in get_args(FeatureMap):
        raise ValueError(f"feature_map must be None or 'relu', got {feature_map!r}")


def apply_feature_map(x: Tensor, feature_map: FeatureMap | None) -> Tensor:
    """Return what stands for queries or keys in a linear attention."""
    return x if feature_map is None else F.relu(x)
