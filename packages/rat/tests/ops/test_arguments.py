"""A wrong argument of a public op gives one line that names it, or a right result."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mezzo_core.testing.arguments import Call, check_arguments, find_fault, replacements
from mezzo_rat.ops import (
    chunk_rat_attention,
    chunk_rat_attention_projected,
    gated_scan,
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
    return reserve(chunk_rat_attention_projected(**x, initial_state=empty).final_state, 8, L)


def scan(rows=B, **more):
    draws = torch.Generator().manual_seed(1)
    given = {"zvg": (rows, T, 9), "gate_bias": (3,), "initial_state": (2, 3)}
    return {n: torch.randn(shape, generator=draws) for n, shape in given.items()} | more


def definition(**arguments):
    return recurrent_rat_attention(**arguments).out  # unused slots of a state may hold anything


def room():
    return {"state": state(), "num_tokens": 3, "chunk_size": L}


OPTIONAL = frozenset({"z", "gate_bias", "scale", "state", "lengths", "cu_seqlens", "initial_state"})
BORDERS = torch.tensor([0, 2, T])
LENGTHS = torch.tensor([T, 3])
INPUTS = {"v": ("inputs",), "zvgqk": ("inputs",), "zvg": ("inputs",)}
CALLS = [
    Call(op, arguments, OPTIONAL - needed, truth, INPUTS)
    for op, arguments, needed, truth in [
        (chunk_rat_attention, parts, set(), definition),
        (chunk_rat_attention, lambda: parts(initial_state=state()), set(), definition),
        (chunk_rat_attention, lambda: parts(rows=1, cu_seqlens=BORDERS.clone()), set(), None),
        (
            recurrent_rat_attention,
            lambda: parts(initial_state=state(), lengths=LENGTHS.clone()),
            set(),
            None,
        ),
        (
            chunk_rat_attention_projected,
            lambda: projection(initial_state=state(), lengths=LENGTHS.clone()),
            set(),
            None,
        ),
        (step_rat_attention_, lambda: projection(tokens=1, state=state()), {"state"}, None),
        (gated_scan, lambda: scan(lengths=LENGTHS.clone()), set(), None),
        (gated_scan, lambda: scan(rows=1, cu_seqlens=BORDERS.clone()), set(), None),
    ]
]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"state": None}, TypeError, "state must be a RATState, got NoneType"),
        ({"num_tokens": -1}, ValueError, "num_tokens must be 0 or more, got -1"),
        ({"num_tokens": 1.5}, TypeError, "num_tokens must be an int, got float"),
        ({"chunk_size": 0}, ValueError, "chunk_size must be 1 or more, got 0"),
    ],
)
def test_room_that_cannot_be_is_refused(change, error, message):
    with pytest.raises(error, match=message):
        reserve(**{**room(), **change})


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
@pytest.mark.any_shapes
def test_each_argument_replaced_is_named_or_right(call):
    check_arguments(call)


@given(data=st.data())
@pytest.mark.any_shapes
def test_several_arguments_replaced_are_named_or_right(data):
    call = data.draw(st.sampled_from(CALLS))
    choices = {name: replacements(value) for name, value in call.arguments().items()}
    names = data.draw(st.sets(st.sampled_from([n for n in choices if choices[n]]), min_size=1))
    replaced = {name: data.draw(st.sampled_from(choices[name])) for name in sorted(names)}
    assert find_fault(call, replaced) is None
