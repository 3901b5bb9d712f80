"""The recipes' settings beside those that the paper prints."""

from typing import Any

import torch
from mezzo_core.papers.checks import beside
from mezzo_core.papers.measurement import Measurement
from mezzo_core.papers.published import Claim, Value

from mezzo_drt.recipes import RECIPES, attention_field
from mezzo_drt.stack import DRTConfig

PAPER_DRT, BASE = "128m_pg19_drt1", "128m_pg19_base"
NEAR = {"total attention field": 1e-3, "parameters": 0.08}
"""658 x 14 is about 9216, as printed; and "comparable" parameters, of which none are printed."""
ROUNDED = {"total tokens": 0.025}
"""The paper prints 32.2 billion tokens; 60,000 steps of 2^19 are 31.5 billion."""


def config(claim: Claim) -> Measurement:
    """Compare the 128M recipe's stack."""
    model = _model(PAPER_DRT)
    c: DRTConfig = model.stack.config
    names = (
        *("layers", "lower layers", "upper layers", "window", "chunk size", "retrieved chunks"),
        "attention field of retrieval",
    )
    ours = (
        len(model.stack.lower) + len(model.stack.upper),
        len(model.stack.lower),
        len(model.stack.upper),
        *(c.window_size, c.chunk_size, c.num_retrieved, c.chunk_size * c.num_retrieved),
    )
    return _in_order(claim, names, ours, PAPER_DRT)


def baseline_field_768(claim: Claim) -> Measurement:
    """Compare the attention fields of BaseLM with the wider window and of DRT."""
    layers = _windows("128m_pg19_base_wide")
    c = RECIPES[PAPER_DRT]().model.stack
    assert isinstance(c, DRTConfig)
    printed = {"BaseLM's field": 12 * 768, "DRT's field": 12 * 512 + 6 * 512}
    ours = {"BaseLM's field": sum(layers), "DRT's field": attention_field(c)}
    return beside(printed, ours, f"recipes 128m_pg19_base_wide, {PAPER_DRT}")


def baseline_14_layers(claim: Claim) -> Measurement:
    """Compare BaseLM with two layers more: its window, field and weights."""
    name = "128m_pg19_base_deep"
    layers = _windows(name)
    printed: dict[str, Value] = {
        "layers": claim.values[0],
        "window": claim.values[1],
        "total attention field": 12 * 512 + 6 * 512,
        "parameters": _parameters(PAPER_DRT),
    }
    ours: dict[str, Value] = {
        "layers": len(layers),
        "window": layers[0],
        "total attention field": sum(layers),
        "parameters": _parameters(name),
    }
    setting = f"recipe {name}; its parameters beside those of {PAPER_DRT}"
    return beside(printed, ours, setting)


def architecture_hyper(claim: Claim) -> Measurement:
    """Compare the shape of the plain 128M model."""
    model = _model(BASE)
    block = model.stack.blocks[0]
    names = ("layers", "heads", "head dimension", "embedding dimension", "FFN size")
    ours = (
        len(model.stack.blocks),
        block.mixer.num_heads,
        block.mixer.config.head_dim,
        model.embed.embedding_dim,
        block.mlp.up.out_features,
    )
    return _in_order(claim, names, ours, BASE)


def optimizer(claim: Claim) -> Measurement:
    """Compare the optimizer of the 128M recipes."""
    optim = RECIPES[PAPER_DRT]().optim
    beta1, beta2, decay, rate, warmup, last = claim.values
    printed: dict[str, Value] = {
        "beta_1": beta1,
        "beta_2": beta2,
        "weight decay": decay,
        "learning rate": rate,
        "warm-up": float(str(warmup).rstrip("%")) / 100,
        "final learning rate": last,
    }
    ours: dict[str, Value] = {
        "beta_1": optim.betas[0],
        "beta_2": optim.betas[1],
        "weight decay": optim.weight_decay,
        "learning rate": optim.lr,
        "warm-up": optim.warmup_fraction,
        "final learning rate": optim.min_lr,
    }
    return beside(printed, ours, f"recipe {PAPER_DRT}")


def training_budget(claim: Claim) -> Measurement:
    """Compare the tokens of a step, the steps and the tokens in all; we have no eight A100."""
    c = RECIPES[PAPER_DRT]()
    step = c.batch_size * c.seq_len
    printed: dict[str, Value] = {"tokens a step": 2**19, "steps": 60_000, "total tokens": 32.2e9}
    ours: dict[str, Value] = {
        "tokens a step": step,
        "steps": c.steps,
        "total tokens": step * c.steps,
    }
    return beside(printed, ours, f"recipe {PAPER_DRT}; left out: the number of GPUs")


def train_context(claim: Claim) -> Measurement:
    """Compare the lengths at which BaseLM and DRT are trained."""
    names = (BASE, PAPER_DRT)
    ours = {name: RECIPES[name]().seq_len for name in names}
    setting = "recipes of 128M; left out: Landmark Attention, the Block Recurrent Transformer, RPT"
    return beside(dict.fromkeys(names, 16 * 1024), ours, setting)


def _in_order(
    claim: Claim, names: tuple[str, ...], ours: tuple[Value, ...], recipe: str
) -> Measurement:
    """Put our values beside the printed ones, which have no labels."""
    printed = dict(zip(names, claim.values, strict=True))
    return beside(printed, dict(zip(names, ours, strict=True)), f"recipe {recipe}")


def _windows(recipe: str) -> list[int]:
    return [block.mixer.config.window_size for block in _model(recipe).stack.blocks]


def _parameters(recipe: str) -> int:
    return sum(weight.numel() for weight in _model(recipe).parameters())


def _model(recipe: str) -> Any:
    """Build a recipe's model without memory for its weights."""
    with torch.device("meta"):
        return RECIPES[recipe]().model.build()
