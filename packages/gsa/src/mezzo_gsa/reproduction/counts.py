"""What the paper says of weights and states, counted in our untrained recipes."""

from typing import Any

from mezzo_core.nn.on_meta import on_meta
from mezzo_core.reproduction.beside import beside_printed
from mezzo_core.reproduction.measurement import Entry, How, Measurement, entries
from mezzo_core.reproduction.published import Claim
from mezzo_core.train.config import TrainConfig

from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.recipes import PAPER_NAMES, RECIPES

SIZES = {"1.3B": "1p3b", "2.7B": "2p7b"}
"""The paper's names of the sizes, with those of our recipes."""


def state_size(claim: Claim) -> Measurement:
    """Count the numbers in the states of all layers, at both sizes."""
    columns, printed, found = ("printed", "ours"), claim.labelled(), list[Entry]()
    for size, prefix in SIZES.items():
        for architecture, name in PAPER_NAMES.items():
            if name in printed:
                model = _model(f"{prefix}_{architecture}")
                states = model.init_state(1)
                numbers = sum(x.numel() for state in states for x in state if x.is_floating_point())
                ours = numbers / (len(states) * model.stack.d_model)
                found += entries({name: (printed[name], ours)}, columns, size)
    setting = (
        "floating-point numbers in the states of all layers over L d, counted in their tensors; "
        "Mamba has no recipe of these sizes"
    )
    return Measurement(tuple(found), columns, setting, How.PAPER, unit="Ld")


def state_details(claim: Claim) -> Measurement:
    """Compare the widths behind the sizes of the states, counted in the states' tensors."""
    first = {name: _model(f"1p3b_{name}").init_state(1)[0] for name in PAPER_NAMES}
    ours = {
        "RetNet query/key head dimension": first["retnet"].h.shape[2],
        "GLA query/key head dimension": first["gla"].h.shape[2],
        "HGRN2 head dimension": first["hgrn2"].h.shape[2],
        "GSA slots": first["gsa"].k.shape[2],
    }
    return beside_printed(claim, ours, "recipes 1p3b_retnet, 1p3b_gla, 1p3b_hgrn2, 1p3b_gsa")


def gate_params(claim: Claim) -> Measurement:
    """Count the weights of one GSA layer of the 1.3B model."""
    model = RECIPES["1p3b_gsa"]().model
    gsa, d = model.mixers[0], model.d_model
    assert isinstance(gsa, GSAConfig)
    weights = sum(w.numel() for w in on_meta(gsa, d).parameters() if w.ndim == 2)
    ours = {
        "slots m": gsa.num_slots,
        "heads H": gsa.num_heads,
        "H x m": gsa.num_heads * gsa.num_slots,
        "model dimension d": d,
        "total parameters": weights / d**2,
        "overhead": weights / d**2 - 4,
    }
    return beside_printed(claim, ours, "one layer of recipe 1p3b_gsa, its matrices")


def parameters(config: TrainConfig) -> int:
    """Count the weights of a recipe's model."""
    return int(on_meta(config.model).num_parameters())


def _model(recipe: str) -> Any:
    return on_meta(RECIPES[recipe]().model)
