"""A wrong argument, or field of a config, gives one line that names it, or a right result.

See `mezzo_core.testing.arguments`.
"""

import inspect

import pytest
import torch
from mezzo_core.testing.arguments import Call, check_arguments, check_fields, check_module_arguments
from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.gated_abc import GatedABCConfig
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.mamba import MambaConfig
from mezzo_gsa.ops.abc import ABCState, chunk_abc, recurrent_abc, step_abc_
from mezzo_gsa.ops.gla import LayerForm, chunk_gla, recurrent_gla, step_gla_, step_gla_layer_
from mezzo_gsa.ops.gsa import (
    GSAState,
    chunk_gsa,
    chunk_gsa_projected,
    recurrent_gsa,
    step_gsa_,
    step_gsa_projected_,
)
from mezzo_gsa.retnet import RetNetConfig

B, T, HQ, H, K, V, M = 2, 6, 4, 2, 4, 6, 8
BORDERS = torch.tensor([0, 4, T])


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def inputs(*rows):
    return {"q": normal(*rows, HQ, K), "k": normal(*rows, H, K), "v": normal(*rows, H, V)}


def slots(rows):
    return GSAState(normal(rows, H, M, K), normal(rows, H, M, V))


def gsa(*rows, **more):
    gates = {"g": -normal(*rows, H, M).abs(), "s": normal(*rows, H, M)}
    return {**inputs(*rows), **gates, "scale": 0.5, "between": "softmax", **more}


def abc(*rows, **more):
    return {**inputs(*rows), "s": normal(*rows, H, M), "scale": 0.5, "reading": "code", **more}


def abc_state(rows):
    return ABCState(*slots(rows), normal(rows, H, M))


def gla(*rows, **more):
    return {**inputs(*rows), "g": -normal(*rows, H, K).abs(), "scale": 0.5, **more}


def layer():
    return {
        **inputs(B),
        "gates": normal(B, H, K),
        "state": normal(B, H, K, V),
        "form": LayerForm(damping=2.0, rope_base=100.0),
        "norm_weight": normal(HQ * V),
        "z": normal(B, HQ * V),
        "places": torch.tensor([3, 0]),
    }


def projection():
    return {
        "x": normal(1, T, (HQ + 2 * H) * K + H * M),
        "num_heads": HQ,
        "num_kv_heads": H,
        "num_slots": M,
        "damping": 8.0,
        "scale": 0.5,
        "initial_state": GSAState(normal(2, H, M, K), normal(2, H, M, K)),
        "cu_seqlens": BORDERS,
    }


def projected_step():
    return {
        "x": normal(B, (HQ + H) * K + H * V + H * M),
        "state": slots(B),
        "num_heads": HQ,
        "damping": 8.0,
        "norm_weight": normal(HQ * V),
        "norm_eps": 1e-5,
        "scale": 0.5,
    }


# Of two tensors that do not fit each other, the other one may be named.
WORDS = {"x": ("cu_seqlens", "norm_weight")}


def call(function, arguments, definition=None):
    parameters = inspect.signature(function).parameters.values()
    optional = frozenset(p.name for p in parameters if "None" in str(p.annotation))
    return Call(function, arguments, optional, definition, WORDS)


CALLS = [
    call(chunk_gsa, lambda: gsa(B, T, initial_state=slots(B)), recurrent_gsa),
    call(chunk_gsa, lambda: gsa(1, T, cu_seqlens=BORDERS), recurrent_gsa),
    call(chunk_abc, lambda: abc(B, T, initial_state=abc_state(B)), recurrent_abc),
    call(chunk_abc, lambda: abc(1, T, cu_seqlens=BORDERS, reading="text"), recurrent_abc),
    call(step_abc_, lambda: abc(B, state=abc_state(B))),
    call(chunk_gla, lambda: gla(B, T, initial_state=normal(B, H, K, V)), recurrent_gla),
    call(chunk_gla, lambda: gla(1, T, cu_seqlens=BORDERS), recurrent_gla),
    call(chunk_gsa_projected, projection),
    call(step_gsa_, lambda: gsa(B, state=slots(B))),
    call(step_gsa_projected_, projected_step),
    call(step_gla_, lambda: gla(B, state=normal(B, H, K, V))),
    call(step_gla_layer_, layer),
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_each_argument_replaced_is_named_or_right(call):
    check_arguments(call)


CONFIGS = [
    GSAConfig(2, num_slots=4, gate_spans=(2.0, 9.0)),
    GSAConfig(2, num_kv_heads=1, num_slots=4, gate="constant"),
    ABCConfig(2, num_slots=4),
    ABCConfig(2, num_slots=4, reading="code", scaled=True),
    GatedABCConfig(2, num_slots=4),
    GLAConfig(2, num_kv_heads=1),
    HGRN2Config(4, lower_bound=0.5),
    RetNetConfig(2, num_kv_heads=1),
    MambaConfig(dt_rank=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_argument_of_a_mixer_replaced_is_named_or_right(config):
    check_module_arguments(config.build(8))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_each_field_replaced_is_named_or_gives_numbers(config):
    check_fields(config, lambda config: config.build(8)(normal(1, 3, 8))[0])
