"""Gated slot attention in plain PyTorch: the chunk form against the definition, and its limits."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.testing import assert_close
from mezzo_gsa.ops import chunk_gla
from mezzo_gsa.ops.gsa import chunk_gsa, chunk_gsa_projected, recurrent_gsa

from .inputs import GATES, assert_same, call
from .inputs import draw_gsa as draw

OPS = (chunk_gsa, recurrent_gsa)
BETWEEN = ["softmax", "none", "swish", "relu", "relu_squared"]
HEADS = [(1, 1), (2, 1), (4, 2), (3, 3)]
PROJECTED = {"num_heads": 4, "num_kv_heads": 2, "num_slots": 5}


def both(inputs, **form):
    assert_same(partial(call, chunk_gsa, **form), partial(call, recurrent_gsa, **form), inputs)


@pytest.mark.parametrize("gates", GATES)
@pytest.mark.parametrize("T", [1, 63, 64, 65, 100, 200])
def test_chunk_form_equals_the_definition_with_all_gradients(T, gates):
    both(draw(2, T, gates=gates), scale=0.7)


@settings(max_examples=settings().max_examples // 4)
@given(
    T=st.integers(1, 80),
    heads=st.sampled_from(HEADS),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4), st.sampled_from([1, 2, 5, 16])),
    gates=st.sampled_from(GATES),
    strength=st.booleans(),
    between=st.sampled_from(BETWEEN),
    seed=st.integers(0, 99),
)
def test_any_shape_and_form_equals_the_definition(T, heads, widths, gates, strength, between, seed):
    inputs = draw(2, T, *heads, *widths, gates=gates, strength=strength, seed=seed)
    both(inputs, scale=0.7, between=between)


@settings(max_examples=settings().max_examples // 6)
@given(
    B=st.integers(1, 3),
    T=st.sampled_from([1, 63, 64, 65, 100, 200]),
    heads=st.sampled_from(HEADS),
    widths=st.sampled_from([(8, 8, 5), (8, 24, 16), (24, 8, 24), (16, 40, 64)]),
    gates=st.sampled_from(GATES),
    strength=st.booleans(),
    seed=st.integers(0, 99),
)
def test_float32_is_exact_to_rounding(B, T, heads, widths, gates, strength, seed):
    low = draw(
        B, T, *heads, *widths, gates=gates, strength=strength, seed=seed, dtype=torch.float32
    )
    if strength:
        low["s"] = low["s"].sigmoid()
    form = {"scale": widths[0] ** -0.5}
    exact = {name: x.double() for name, x in low.items()}
    truth = call(recurrent_gsa, **exact, **form)
    for op in OPS:
        for name, x, ref in zip(
            ("out", "final k", "final v"), call(op, **low, **form), truth, strict=True
        ):
            assert_close(name, x, ref, rtol=1e-5)


@pytest.mark.parametrize("between", BETWEEN)
@pytest.mark.parametrize("strength", [False, True])
def test_the_definition_is_the_equation(strength, between):
    inputs = draw(1, 6, HQ=1, strength=strength)
    q, k, v, g = (inputs[name][0, :, 0] for name in "qkvg")
    a = g.exp()
    s = inputs["s"][0, :, 0] if strength else 1 - a
    slots_k, slots_v = inputs["k0"][0, 0], inputs["v0"][0, 0]
    read = {
        "softmax": lambda x: x.exp() / x.exp().sum(),
        "none": lambda x: x,
        "swish": lambda x: x * x.sigmoid(),
        "relu": lambda x: x.clamp(min=0),
        "relu_squared": lambda x: x.clamp(min=0) ** 2,
    }[between]
    expected = []
    for t in range(6):
        slots_k = torch.diag(a[t]) @ slots_k + torch.outer(s[t], k[t])
        slots_v = torch.diag(a[t]) @ slots_v + torch.outer(s[t], v[t])
        expected.append(slots_v.T @ read(0.5 * slots_k @ q[t]))
    out, last_k, last_v = call(recurrent_gsa, **inputs, scale=0.5, between=between)
    assert_close("out", out[0, :, 0], torch.stack(expected), rtol=1e-12)
    assert_close("final k", last_k[0, 0], slots_k, rtol=1e-12)
    assert_close("final v", last_v[0, 0], slots_v, rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_gates_at_one_keep_the_memory_for_ever(op):
    inputs = draw(2, 150, HQ=1, gates="zero", dtype=torch.float32)
    out, last_k, last_v = call(op, **inputs)
    assert torch.equal(last_k, inputs["k0"])
    assert torch.equal(last_v, inputs["v0"])
    logits = inputs["q"][:, :, 0] @ inputs["k0"][:, 0].mT
    assert_close("out", out[:, :, 0], logits.softmax(-1) @ inputs["v0"][:, 0], rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
def test_gates_at_zero_remember_the_last_token_alone(op):
    inputs = draw(2, 150, HQ=2, H=2)
    inputs["g"] = torch.full_like(inputs["g"], -100.0)
    out, last_k, last_v = call(op, **inputs)
    assert_close("out", out, inputs["v"], rtol=1e-12)
    for last, x in ((last_k, inputs["k"]), (last_v, inputs["v"])):
        assert_close("state", last, x[:, -1, :, None].expand_as(last), rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_without_gates_the_memory_is_a_sum_of_what_was_written(op):
    inputs = draw(2, 130, HQ=1, strength=True)
    inputs["g"] = None
    written = inputs["s"][:, :, 0, :, None] * inputs["k"][:, :, 0, None]
    slots_k = inputs["k0"] + written.cumsum(1)  # one head: (B, T, M, K)
    slots_v = inputs["v0"] + (inputs["s"][:, :, 0, :, None] * inputs["v"][:, :, 0, None]).cumsum(1)
    p = torch.softmax(torch.einsum("btmk,btk->btm", slots_k, inputs["q"][:, :, 0]), -1)
    out, last_k, _ = call(op, **inputs)
    assert_close("out", out[:, :, 0], torch.einsum("btm,btmv->btv", p, slots_v), rtol=1e-10)
    assert_close("final k", last_k[:, 0], slots_k[:, -1], rtol=1e-10)
    zeros = call(op, **{**inputs, "g": torch.zeros_like(inputs["s"])})
    assert torch.equal(out, zeros[0])


def test_with_a_slot_for_each_token_the_last_output_is_softmax_attention():
    inputs = draw(1, 20, HQ=1, M=20) | {"g": None, "k0": None, "v0": None}
    inputs["s"] = torch.eye(20, dtype=torch.float64)[None, :, None]
    q, k, v = (inputs[name][0, :, 0] for name in "qkv")
    out, *_ = call(chunk_gsa, **inputs)
    assert_close("out", out[0, -1, 0], (k @ q[-1]).softmax(-1) @ v, rtol=1e-12)


def test_the_second_pass_is_gated_linear_attention():
    inputs = draw(1, 70, HQ=1)
    k, v, g = (inputs[name] for name in "kvg")
    slots, weights = inputs["k0"][0, 0], []
    for t in range(70):
        a = g[0, t, 0, :, None].exp()
        slots = a * slots + (1 - a) * k[0, t]
        weights.append((slots @ inputs["q"][0, t, 0]).softmax(-1))
    queries = torch.stack(weights)[None, :, None]
    expected = chunk_gla(queries, -torch.expm1(g), v, g, initial_state=inputs["v0"]).out
    assert_close("out", call(chunk_gsa, **inputs)[0], expected, rtol=1e-10)


@pytest.mark.parametrize("swish", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_a_projection_gives_what_its_parts_give_with_all_gradients(packed, swish):
    D, M, T = 3, PROJECTED["num_slots"], 70
    S = 3 if packed else 2
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (1 if packed else 2, T, 8 * D + 2 * M), "k0": (S, 2, M, D), "v0": (S, 2, M, D)}
    inputs = {
        name: torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, shape in shapes.items()
    }
    cu_seqlens = torch.tensor([0, 1, 1, T]) if packed else None
    form = {"scale": 0.7, "between": "swish", "cu_seqlens": cu_seqlens}

    def apart(x, **states):
        q, k, v, logits = (
            part.unflatten(2, (heads, -1))
            for part, heads in zip(
                x.split([4 * D, 2 * D, 2 * D, 2 * M], 2), (4, 2, 2, 2), strict=True
            )
        )
        if swish:
            q, k, v = (part * part.sigmoid() for part in (q, k, v))
        return call(chunk_gsa, q=q, k=k, v=v, g=F.logsigmoid(logits) / 3, **states, **form)

    def whole(**x):
        return call(chunk_gsa_projected, **x, **PROJECTED, damping=3.0, swish=swish, **form)

    assert_same(whole, apart, inputs)
