"""What is counted of the recipes: caches, widths, settings beside the printed ones."""

import math
import re
from typing import Any

import torch
from mezzo_core.papers.checks import beside
from mezzo_core.papers.measurement import How, Measurement, entries
from mezzo_core.papers.published import Claim, Value
from mezzo_core.positions import alibi_slopes
from mezzo_core.train.config import TrainConfig
from mezzo_core.train.optim import build_optimizer
from torch import nn

from mezzo_recurrent_transformer.recipes import RECIPES
from mezzo_recurrent_transformer.synthetic.sweep import SweepConfig
from mezzo_recurrent_transformer.synthetic.tasks import TASKS

ROUNDED = {"tokens": 0.1}
"""The paper prints "about 6b" and "about 3b" tokens; its steps have 6.55b and 3.28b."""
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


def shapes(claim: Claim, size: str) -> Measurement:
    """Compare layers, width, MLP width and heads of a size's recipes of both architectures."""
    printed, ours = dict[str, Value](), dict[str, Value]()
    for text in claim.values[:2]:
        numbers = [int(number) for number in re.findall(r"\d+", str(text))]
        for architecture in ("transformer", "recurrent"):
            name = f"{size}_{numbers[0]}_{architecture}"
            blocks = _model(name).stack.blocks
            found = (
                len(blocks),
                blocks[0].d_model,
                blocks[0].mlp.up.out_features,
                blocks[0].num_heads,
            )
            for what, theirs, own in zip(
                ("layers", "width", "MLP width", "heads"), numbers, found, strict=True
            ):
                printed[f"{what}, {name}"], ours[f"{what}, {name}"] = theirs, own
    return beside(printed, ours, f"recipes {size}_12_..., {size}_6_...")


def hyper_300m_training(claim: Claim) -> Measurement:
    """Compare tokens, steps, batch, T and ALiBi's largest exponent of the 300M recipes."""
    config = RECIPES["300m_12_recurrent"]()
    block = _model(config.name).stack.blocks[0]
    names = ("tokens", "steps", "batch", "sequence length", "maximum ALiBi bias")
    ours = (
        _tokens(config),
        config.steps,
        config.batch_size,
        config.seq_len,
        _steepest(block),
    )
    printed = (6e9, *map(float, claim.values[1:]))
    return beside(
        dict(zip(names, printed, strict=True)),
        dict(zip(names, ours, strict=True)),
        f"recipe {config.name}",
    )


def hyper_150m(claim: Claim) -> Measurement:
    """Compare the shapes of the 150M recipes, their tokens and the first of the two batches."""
    found, config = shapes(claim, "150m"), RECIPES["150m_12_recurrent"]()
    further: dict[str, tuple[Value, Value]] = {
        "tokens": (3e9, _tokens(config)),
        "batch": (claim.values[3], config.batch_size),
    }
    columns, setting = found.columns, f"{found.setting}; batch 512 of the two"
    every = (*found.entries, *entries(further, columns))
    return Measurement(every, columns, setting, How.PAPER)


def hyper_optimizer(claim: Claim) -> Measurement:
    """Compare the optimizer of the 300M recipe, one point of the paper's sweep."""
    config = RECIPES["300m_12_recurrent"]()
    defaults = build_optimizer(nn.Linear(1, 1), config.optim).defaults
    rates, beta1, betas2, eps, decay, warmup = claim.values
    ours: dict[str, Value] = {
        "learning rate": config.optim.lr,
        "beta_1": config.optim.betas[0],
        "beta_2": config.optim.betas[1],
        "epsilon": defaults["eps"],
        "weight decay": config.optim.weight_decay,
        "warm-up": config.optim.warmup_fraction,
    }
    printed: dict[str, Value] = {
        "learning rate": _nearest(rates, config.optim.lr),
        "beta_1": beta1,
        "beta_2": _nearest(betas2, config.optim.betas[1]),
        "epsilon": eps,
        "weight decay": decay,
        "warm-up": float(str(warmup).rstrip("%")) / 100,
    }
    return beside(printed, ours, f"recipe {config.name}; of a sweep, the nearest value")


def hyper_synthetic(claim: Claim) -> Measurement:
    """Compare the layer of the synthetic tasks."""
    config = _synthetic()
    with torch.device("meta"):
        stack: Any = config.model.build().stack
    (block,) = stack.blocks
    ours = (
        1,
        block.d_model,
        block.mlp.up.out_features,
        block.num_heads,
        _steepest(block),
    )
    names = ("layers", "width", "MLP width", "heads", "maximum ALiBi bias")
    printed = map(float, claim.values)
    return beside(
        dict(zip(names, printed, strict=True)),
        dict(zip(names, ours, strict=True)),
        "the sweep over the synthetic tasks",
    )


def hyper_synthetic_optimizer(claim: Claim) -> Measurement:
    """Compare the optimizer of the synthetic tasks, and what is swept."""
    sweep, optim = SweepConfig(), _synthetic().optim
    rates, beta1, beta2, eps, decays = claim.values
    printed: dict[str, Value] = {"beta_1": beta1, "beta_2": beta2, "epsilon": eps}
    defaults = build_optimizer(nn.Linear(1, 1), optim).defaults
    ours: dict[str, Value] = {
        "beta_1": optim.betas[0],
        "beta_2": optim.betas[1],
        "epsilon": defaults["eps"],
    }
    # A rate is printed twice.
    swept = {"learning rate": (rates, sweep.learning_rates), "decay": (decays, sweep.weight_decays)}
    for name, (theirs, own) in swept.items():
        values = sorted({float(value) for value in str(theirs).split(",")})
        printed |= {f"{name} {i}": value for i, value in enumerate(values)}
        ours |= {f"{name} {i}": value for i, value in enumerate(sorted(own))}
    return beside(printed, ours, "the sweep over the synthetic tasks")


def _synthetic() -> TrainConfig:
    """Return one run of the sweep over the synthetic tasks."""
    return SweepConfig().run("recurrent", TASKS["copying"], 1e-3, 0.0, 0)


def _steepest(block: Any) -> float:
    """Return the maximum ALiBi bias: the exponent of the smallest slope."""
    return -math.log2(float(alibi_slopes(block.num_heads, block.config.alibi)[-1]))


def _nearest(sweep: Value, ours: float) -> float:
    """Return the value of a printed sweep, such as "1e-3, 3e-3", that is nearest to ours."""
    return min(map(float, str(sweep).split(",")), key=lambda value: abs(value - ours))


def _model(recipe: str) -> Any:
    """Build a recipe's model without memory for its weights."""
    with torch.device("meta"):
        return RECIPES[recipe]().model.build()


def _cache(recipe: str) -> int:
    return _model(recipe).state_bytes(RECIPES[recipe]().seq_len)


def _tokens(config: TrainConfig) -> int:
    return config.steps * config.batch_size * config.seq_len
