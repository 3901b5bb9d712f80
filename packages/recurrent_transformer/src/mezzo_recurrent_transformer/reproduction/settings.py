"""What is computed of the recipes: caches, widths, and what a recipe says indirectly."""

import math
from typing import Any

import torch
from mezzo_core.positions import alibi_slopes
from mezzo_core.reproduction.beside import beside
from mezzo_core.reproduction.measurement import How, Measurement, entries
from mezzo_core.reproduction.published import Claim, Value
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.optim import build_optimizer
from torch import nn

from mezzo_recurrent_transformer.recipes import RECIPES

SCALED = {f"{what}, {size}": 0.05 for what in ("width", "KV cache") for size in ("150m", "300m")}
"""Widths are multiples of a head's: they scale by 1.375 and 1.455 in the place of sqrt(2)."""
SCALED["scale"] = 0.05


def kv_cache_30(claim: Claim) -> Measurement:
    """Compute the cache of a sequence of T tokens with 6 layers and with 12, at 300M weights."""
    rows = {f"{n} layers": [_cache(f"300m_{n}_recurrent") / 1e6] for n in (12, 6)}
    setting = "keys and values of 512 tokens in float32, recipes 300m_12_recurrent and 300m_6_..."
    return Measurement(entries(rows, ("MB",)), ("MB",), setting, How.PAPER, unit="MB")


def kv_cache_sqrt(claim: Claim) -> Measurement:
    """Compare width and cache with 12 layers and with 6 with the square root of 2."""
    printed, ours = dict[str, Value](), dict[str, Value]()
    for size in ("150m", "300m"):
        deep, wide = (f"{size}_{layers}_recurrent" for layers in (12, 6))
        ours[f"width, {size}"] = RECIPES[wide]().model.d_model / RECIPES[deep]().model.d_model
        ours[f"KV cache, {size}"] = _cache(deep) / _cache(wide)
        printed |= {f"{what}, {size}": math.sqrt(2) for what in ("width", "KV cache")}
    return beside(printed, ours, "half the layers, alpha = 2, at 150M and at 300M weights")


def width_scaling(claim: Claim) -> Measurement:
    """Compare the widths of the 300M recipes."""
    twelve, six = (RECIPES[f"300m_{layers}_recurrent"]().model.d_model for layers in (12, 6))
    names = ("width at 12 layers", "width at 6 layers", "scale")
    printed = (*map(float, claim.values[:2]), math.sqrt(2))
    ours = (twelve, six, six / twelve)
    return beside(
        dict(zip(names, printed, strict=True)),
        dict(zip(names, ours, strict=True)),
        "recipes 300m_12_recurrent, 300m_6_recurrent",
    )


def epsilon(config: TrainConfig) -> float:
    """Return the epsilon of a recipe's optimizer."""
    return float(build_optimizer(nn.Linear(1, 1), config.optim).defaults["eps"])


def largest_bias(config: TrainConfig) -> float:
    """Return the maximum ALiBi bias of a recipe: the exponent of the smallest slope."""
    with torch.device("meta"):
        stack: Any = config.model.build().stack
    layer = stack.blocks[0].config
    return -math.log2(float(alibi_slopes(stack.d_model // layer.head_dim, layer.alibi)[-1]))


def _model(recipe: str) -> Any:
    """Build a recipe's model without memory for its weights."""
    with torch.device("meta"):
        return RECIPES[recipe]().model.build()


def _cache(recipe: str) -> int:
    return _model(recipe).state_bytes(RECIPES[recipe]().seq_len)
