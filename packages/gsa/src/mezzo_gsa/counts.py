"""What the paper says of weights, states and hyperparameters, counted in our untrained recipes."""

import torch
from mezzo_core.nn.contract import AbstractMixer
from mezzo_core.papers.checks import beside_printed
from mezzo_core.papers.measurement import Entry, How, Measurement
from mezzo_core.papers.published import Claim
from mezzo_core.train.config import TrainConfig

from mezzo_gsa.convert.recipe import t2r
from mezzo_gsa.gsa import GSA
from mezzo_gsa.recipes import PAPER_NAMES, RECIPES

SIZES = {"1.3B": "1p3b", "2.7B": "2p7b"}
"""The paper's names of the sizes, with those of our recipes."""
LM_ROUNDED = {
    "tokens": 0.01,
    "warm-up tokens": 0.01,
    "small model parameters": 0.06,
    "large model parameters": 0.02,
}
T2R_ROUNDED = {"warm-up steps": 1e-6, "training length": 0.03, "batch tokens": 0.05}
"""Relative tolerances: the paper rounds counts of tokens, where the recipes use powers of two."""


def state_size(claim: Claim) -> Measurement:
    """Count the numbers in the states of all layers, at both sizes."""
    printed = claim.labelled()
    numbers = [
        Entry(name, column, value, group=size)
        for size, prefix in SIZES.items()
        for architecture, name in PAPER_NAMES.items()
        if name in printed
        for column, value in (
            ("printed", printed[name]),
            ("ours", _state_numbers(RECIPES[f"{prefix}_{architecture}"]())),
        )
    ]
    setting = (
        "floating-point numbers in the states of all layers over L d, counted in their tensors; "
        "Mamba is not in this package"
    )
    return Measurement(tuple(numbers), ("printed", "ours"), setting, How.PAPER, unit="Ld")


def state_details(claim: Claim) -> Measurement:
    """Compare the widths behind the sizes of the states, counted in the states' tensors."""
    states = {name: _first_mixer(RECIPES[f"1p3b_{name}"]()).init_state(1) for name in PAPER_NAMES}
    ours = {
        "RetNet query/key head dimension": states["retnet"].h.shape[2],
        "GLA query/key head dimension": states["gla"].h.shape[2],
        "HGRN2 head dimension": states["hgrn2"].h.shape[2],
        "GSA slots": states["gsa"].k.shape[2],
    }
    return beside_printed(claim, ours, "recipes 1p3b_retnet, 1p3b_gla, 1p3b_hgrn2, 1p3b_gsa")


def gate_params(claim: Claim) -> Measurement:
    """Count the weights of one GSA layer of the 1.3B model."""
    mixer = _gsa(RECIPES["1p3b_gsa"]())
    d = mixer.d_model
    H, M = mixer.config.num_heads, mixer.config.num_slots
    weights = sum(weight.numel() for weight in mixer.parameters() if weight.ndim == 2)
    ours = {
        "slots m": M,
        "heads H": H,
        "H x m": H * M,
        "model dimension d": d,
        "total parameters": weights / d**2,
        "overhead": weights / d**2 - 4,
    }
    return beside_printed(claim, ours, "one layer of recipe 1p3b_gsa, its matrices")


def damping(claim: Claim) -> Measurement:
    """Compare the damping of the gate."""
    return beside_printed(
        claim, {"tau": _gsa(RECIPES["1p3b_gsa"]()).config.damping}, "recipe 1p3b_gsa"
    )


def setup_lm(claim: Claim) -> Measurement:
    """Compare the 1.3B and 2.7B recipes; their names count fewer weights than they have."""
    small, large = (RECIPES[f"{prefix}_gsa"]() for prefix in SIZES.values())
    tokens = small.steps * small.batch_size * small.seq_len
    ours = {
        "small model parameters": _parameters(small),
        "large model parameters": _parameters(large),
        "tokens": tokens,
        "weight decay": small.optim.weight_decay,
        "peak learning rate": small.optim.lr,
        "final learning rate": small.optim.min_lr,
        "warm-up tokens": small.optim.warmup_fraction * tokens,
        "heads 1.3B": _gsa(small).config.num_heads,
        "heads 2.7B": _gsa(large).config.num_heads,
        "slots": _gsa(small).config.num_slots,
    }
    return beside_printed(claim, ours, "recipes 1p3b_gsa, 2p7b_gsa")


def setup_t2r(claim: Claim) -> Measurement:
    """Compare the recipe of fine-tuning from Mistral 7B."""
    config = t2r("gsa")
    ours = {
        "peak learning rate": config.optim.lr,
        "warm-up steps": config.optim.warmup_fraction * config.steps,
        "training length": config.seq_len,
        "batch tokens": config.batch_size * config.seq_len,
    }
    return beside_printed(claim, ours, "recipe t2r_gsa")


def _state_numbers(config: TrainConfig) -> float:
    """Return how many floating-point numbers a model's state has, in units of L d."""
    with torch.device("meta"):
        states = config.model.build().init_state(1)
    numbers = sum(x.numel() for state in states for x in state if x.is_floating_point())
    return numbers / (len(states) * config.model.d_model)


def _parameters(config: TrainConfig) -> int:
    with torch.device("meta"):
        return config.model.build().num_parameters()


def _first_mixer(config: TrainConfig) -> AbstractMixer:
    with torch.device("meta"):
        return config.model.mixers[0].build(config.model.d_model)


def _gsa(config: TrainConfig) -> GSA:
    mixer = _first_mixer(config)
    assert isinstance(mixer, GSA)
    return mixer
