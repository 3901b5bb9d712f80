"""Each argument of the public ops replaced by something else: one line that names it, or right."""

import pytest
import torch
from mezzo_core.testing.arguments import Call, check_arguments
from mezzo_rat.ops.gated_scan import gated_scan
from mezzo_rat.ops.rat_attention import (
    chunk_rat_attention,
    chunk_rat_attention_zvgqk,
    init_state,
    recurrent_rat_attention,
    reserve,
    step_rat_attention_,
)

B, T, H, G, D, L = 2, 6, 4, 2, 4, 4
SIZES = {"num_heads": H, "num_groups": G}


def form(**more):
    bias = torch.randn(H, D, generator=torch.Generator().manual_seed(0))
    return {"chunk_size": L, "gate_bias": bias, "rope_base": 100.0, "scale": 0.7, **more}


def parts(rows=B, tokens=T, **more):
    draws = torch.Generator().manual_seed(1)
    heads = {"q": G, "k": G, "v": H, "g": H, "z": H}
    given = {n: torch.randn(rows, tokens, h, D, generator=draws) for n, h in heads.items()}
    return {**given, **form(), **more}


def projection(rows=B, tokens=T, **more):
    x = torch.randn(rows, tokens, 64, generator=torch.Generator().manual_seed(1))
    return {"zvgqk": x, **SIZES, **form(), **more}


def state():
    empty = init_state(B, H, D, dtype=torch.float32, device=torch.device("cpu"))
    x = projection(tokens=5)
    return reserve(chunk_rat_attention_zvgqk(**x, state=empty).final_state, 8, L)


def scan(rows=B, **more):
    draws = torch.Generator().manual_seed(1)
    given = {"zvg": (rows, T, 9), "gate_bias": (3,), "initial_state": (2, 3)}
    return {n: torch.randn(shape, generator=draws) for n, shape in given.items()} | more


def definition(**arguments):
    return recurrent_rat_attention(**arguments).out  # unused slots of a state may hold anything


OPTIONAL = frozenset({"z", "gate_bias", "scale", "state", "lengths", "cu_seqlens", "initial_state"})
BORDERS = torch.tensor([0, 2, T])
LENGTHS = torch.tensor([T, 3])
INPUTS = {"v": ("inputs",), "zvgqk": ("inputs",), "zvg": ("inputs",)}
CALLS = [
    Call(op, arguments, OPTIONAL - needed, truth, INPUTS)
    for op, arguments, needed, truth in [
        (chunk_rat_attention, parts, set(), definition),
        (chunk_rat_attention, lambda: parts(state=state()), set(), definition),
        (chunk_rat_attention, lambda: parts(rows=1, cu_seqlens=BORDERS.clone()), set(), None),
        (
            recurrent_rat_attention,
            lambda: parts(state=state(), lengths=LENGTHS.clone()),
            set(),
            None,
        ),
        (
            chunk_rat_attention_zvgqk,
            lambda: projection(state=state(), lengths=LENGTHS.clone()),
            set(),
            None,
        ),
        (step_rat_attention_, lambda: projection(tokens=1, state=state()), {"state"}, None),
        (gated_scan, lambda: scan(lengths=LENGTHS.clone()), set(), None),
        (gated_scan, lambda: scan(rows=1, cu_seqlens=BORDERS.clone()), set(), None),
    ]
]


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_each_argument_replaced_is_named_or_right(call):
    check_arguments(call)
