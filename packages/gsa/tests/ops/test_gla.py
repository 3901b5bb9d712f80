"""Gated linear attention: the chunk form against the definition, extreme gates, what it refuses."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.testing import assert_close
from mezzo_gsa.ops.gla import chunk_gla, recurrent_gla

from .inputs import assert_same, call, states, tokens
from .inputs import draw_gla as draw

OPS = (chunk_gla, recurrent_gla)
HEADS = [(1, 1), (2, 1), (4, 2), (3, 3)]


def both(inputs, **form):
    assert_same(partial(call, chunk_gla, **form), partial(call, recurrent_gla, **form), inputs)


@settings(max_examples=settings().max_examples // 4)
@given(
    T=st.integers(1, 70),
    heads=st.sampled_from(HEADS),
    gate=st.sampled_from(["channel", "head"]),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 99),
)
def test_chunk_form_equals_the_definition_with_all_gradients(T, heads, gate, widths, seed):
    inputs = draw(2, T, *heads, *widths, gate=gate, seed=seed)
    both(inputs, scale=0.7)


@pytest.mark.parametrize("T", [63, 64, 65, 128, 193])
@pytest.mark.parametrize("gate", ["channel", "head"])
def test_chunk_form_equals_the_definition_over_several_chunks(T, gate):
    both(draw(1, T, gate=gate))


def test_the_definition_is_the_equation():
    inputs = draw(1, 5, HQ=1, H=1)
    q, k, v, g, state = (x[0] for x in inputs.values())
    S, expected = state[0], []
    for t in range(5):
        S = torch.diag(g[t, 0].exp()) @ S + torch.outer(k[t, 0], v[t, 0])
        expected.append(0.5 * S.T @ q[t, 0])
    out, final_state = recurrent_gla(**inputs, scale=0.5)
    assert_close("out", out[0, :, 0], torch.stack(expected), rtol=1e-12)
    assert_close("final_state", final_state[0, 0], S, rtol=1e-12)


def test_without_gates_it_is_linear_attention():
    inputs = draw(2, 90, HQ=1, H=1)
    q, k, v, g, _ = inputs.values()
    scores = (q[:, :, 0] @ k[:, :, 0].mT).tril()
    out, _ = chunk_gla(q, k, v, torch.zeros_like(g))
    assert_close("out", out[:, :, 0], scores @ v[:, :, 0], rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_a_gate_of_each_head_is_the_same_gate_in_every_channel(op):
    inputs = draw(1, 20, gate="head")
    wide = {**inputs, "g": inputs["g"].expand(-1, -1, -1, 3)}
    assert_close("out", op(**inputs).out, op(**wide).out, rtol=1e-12)


GATES = [0.0, -1e-4, -50.0, -1e4, float("-inf")]


@pytest.mark.parametrize("value", GATES)
def test_extreme_gates_equal_the_definition_with_all_gradients(value):
    inputs = draw(1, 80)
    both({**inputs, "g": torch.full_like(inputs["g"], value)})


@pytest.mark.parametrize("gate", ["channel", "head"])
def test_mixtures_of_extreme_gates_keep_every_digit_of_float32(gate):
    inputs = draw(1, 200, gate=gate)
    picks = torch.randint(len(GATES), inputs["g"].shape, generator=torch.manual_seed(0))
    inputs["g"] = torch.tensor(GATES, dtype=torch.float64)[picks]
    inputs["g"][:, ::3] = -1e-4  # every third token forgets little
    both(inputs)
    low = {name: x.float() for name, x in inputs.items()}
    assert_close("out", chunk_gla(**low).out, recurrent_gla(**inputs).out, rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_padding_that_neither_writes_nor_forgets_leaves_the_state(op):
    inputs = draw(1, 9)
    inputs["k"][:, 6:], inputs["g"][:, 6:] = 0.0, 0.0
    whole, short = op(**inputs), op(**tokens(inputs, 0, 6), **states(inputs))
    assert_close("state", whole.final_state, short.final_state, rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.ones(2, 4, 3)}, ValueError, r"q must be \(B, T, HQ, K\), HQ, K"),
        ({"g": torch.ones(2, 4, 1, 2)}, ValueError, r"g must be \(2, 4, 1, 3\) or \(2, 4, 1, 1\)"),
        ({"g": torch.ones(2, 4, 1, 3).int()}, TypeError, "g must be floating-point .* got int32"),
        ({"initial_state": torch.ones(1, 1, 3, 5)}, ValueError, r"initial_state must be \(2, 1, 3"),
        ({"initial_state": torch.ones(2, 1, 3, 5).int()}, TypeError, "initial_state must be float"),
        ({"initial_state": (torch.ones(1),)}, TypeError, "initial_state must be a tensor, got tup"),
        ({"cu_seqlens": torch.tensor([0, 4])}, ValueError, "into one row, got B = 2"),
    ],
)
@pytest.mark.any_shapes
def test_bad_arguments_are_named(op, change, error, message):
    inputs = draw(2, 4, dtype=torch.float32)
    with pytest.raises(error, match=f"{op.__name__}: .*{message}"):
        op(**{**inputs, **change})


@pytest.mark.any_shapes
def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="impl must be one of"):
        chunk_gla(**draw(1, 4), impl="cuda")
