"""Gated linear attention: the chunk form against the definition, states, packing, extreme gates."""

from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.testing import assert_close, grads
from mezzo_gsa.ops.gla import chunk_gla, recurrent_gla

OPS = (chunk_gla, recurrent_gla)
HEADS = [(1, 1), (2, 1), (4, 2), (3, 3)]


def draw(B, T, HQ=2, H=1, K=3, V=5, *, gate="channel", states=None, dtype=torch.float64, seed=0):
    """Draw inputs by name; `states` rows of initial state, B of them if None."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    g = torch.nn.functional.logsigmoid(2 * normal(B, T, H, K if gate == "channel" else 1))
    return {
        "q": normal(B, T, HQ, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        "v": normal(B, T, H, V).to(dtype),
        "g": g if dtype == torch.float64 else g.float(),
        "initial_state": normal(B if states is None else states, H, K, V).to(g.dtype),
    }


def tokens(inputs, start, end):
    return {n: x if n == "initial_state" else x[:, start:end] for n, x in inputs.items()}


def assert_same(op, ref, inputs, rtol=1e-10, **form):
    """Compare both results and all gradients."""
    out, _ = op(**inputs, **form)
    douts = torch.randn_like(out), torch.randn_like(inputs["initial_state"])
    (truth, dtruth), (found, dfound) = (
        grads(lambda fn=fn, **x: tuple(fn(**x, **form)), inputs, douts) for fn in (ref, op)
    )
    for name, a, b in zip(("out", "final_state"), found, truth, strict=True):
        assert_close(name, a, b, rtol=rtol, atol=1e-12)
    for name, b in dtruth.items():
        assert_close(f"d{name}", dfound[name], b, rtol=rtol, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(
    T=st.integers(1, 70),
    heads=st.sampled_from(HEADS),
    gate=st.sampled_from(["channel", "head"]),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    seed=st.integers(0, 99),
)
def test_chunk_form_equals_the_definition_with_all_gradients(T, heads, gate, widths, seed):
    inputs = draw(2, T, *heads, *widths, gate=gate, seed=seed)
    assert_same(chunk_gla, recurrent_gla, inputs, scale=0.7)


@pytest.mark.parametrize("T", [63, 64, 65, 128, 193])
@pytest.mark.parametrize("gate", ["channel", "head"])
def test_chunk_form_equals_the_definition_over_several_chunks(T, gate):
    assert_same(chunk_gla, recurrent_gla, draw(1, T, gate=gate))


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
def test_query_heads_read_the_head_of_their_group(op):
    inputs = draw(2, 9, HQ=4, H=2)
    spread = {n: inputs[n].repeat_interleave(2, dim=2) for n in ("k", "v", "g")}
    state = inputs["initial_state"].repeat_interleave(2, dim=1)
    alone = op(**{**inputs, **spread, "initial_state": state})
    assert_close("out", op(**inputs).out, alone.out, rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
def test_a_gate_of_each_head_is_the_same_gate_in_every_channel(op):
    inputs = draw(1, 20, gate="head")
    wide = {**inputs, "g": inputs["g"].expand(-1, -1, -1, 3)}
    assert_close("out", op(**inputs).out, op(**wide).out, rtol=1e-12)


GATES = [0.0, -1e-4, -50.0, -1e4, float("-inf")]


@pytest.mark.parametrize("value", GATES)
def test_extreme_gates_equal_the_definition_with_all_gradients(value):
    inputs = draw(1, 80)
    assert_same(
        chunk_gla, recurrent_gla, {**inputs, "g": torch.full_like(inputs["g"], value)}
    )  # fmt: skip


@pytest.mark.parametrize("gate", ["channel", "head"])
def test_mixtures_of_extreme_gates_keep_every_digit_of_float32(gate):
    inputs = draw(1, 200, gate=gate)
    picks = torch.randint(len(GATES), inputs["g"].shape, generator=torch.manual_seed(0))
    inputs["g"] = torch.tensor(GATES, dtype=torch.float64)[picks]
    inputs["g"][:, ::3] = -1e-4  # stretches over which much is remembered, after what forgets all
    assert_same(chunk_gla, recurrent_gla, inputs)
    low = {name: x.float() for name, x in inputs.items()}
    assert_close("out", chunk_gla(**low).out, recurrent_gla(**inputs).out, rtol=1e-6)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("gate", ["channel", "head"])
def test_gradients_are_those_of_finite_differences(op, gate):
    inputs = draw(2, 5, HQ=2, H=1, K=2, V=3, gate=gate)
    values = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(
        lambda *xs: tuple(op(**dict(zip(inputs, xs, strict=True)))), values
    )


@pytest.mark.parametrize("op", OPS)
def test_packed_gradients_are_those_of_finite_differences(op):
    inputs = draw(1, 6, K=2, V=2, states=4)
    values = [x.requires_grad_() for x in inputs.values()]
    borders = torch.tensor([0, 1, 1, 5, 6])
    assert torch.autograd.gradcheck(
        lambda *xs: tuple(op(**dict(zip(inputs, xs, strict=True)), cu_seqlens=borders)), values
    )


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any),
    gate=st.sampled_from(["channel", "head"]),
    borders_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_sequences_equal_each_alone_with_all_gradients(lengths, gate, borders_dtype):
    borders = [0, *accumulate(lengths)]
    inputs = draw(1, borders[-1], gate=gate, states=len(lengths))
    cu_seqlens = torch.tensor(borders, dtype=borders_dtype)

    def alone(**x):
        parts = [
            chunk_gla(**{**tokens(x, a, b), "initial_state": x["initial_state"][i : i + 1]})
            for i, (a, b) in enumerate(pairwise(borders))
        ]
        return torch.cat([out for out, _ in parts], 1), torch.cat([last for _, last in parts])

    for op in OPS:
        assert_same(lambda **x: op(**x, cu_seqlens=cu_seqlens), alone, inputs)  # noqa: B023


@settings(max_examples=20, deadline=None)
@given(splits=st.lists(st.integers(0, 70), min_size=1, max_size=5), seed=st.integers(0, 99))
def test_segments_through_a_state_equal_the_whole(splits, seed):
    inputs = draw(2, sum(splits), seed=seed)
    whole, last = chunk_gla(**inputs)
    for op in OPS:
        state, outs = inputs["initial_state"], []
        for end, length in zip(accumulate(splits), splits, strict=True):
            part = {**tokens(inputs, end - length, end), "initial_state": state}
            out, state = op(**part)
            outs.append(out)
        assert_close("out", torch.cat(outs, 1), whole, rtol=1e-10)
        assert_close("final_state", state, last, rtol=1e-10)


@pytest.mark.parametrize("op", OPS)
def test_the_initial_state_is_not_overwritten_and_defaults_to_zeros(op):
    inputs = draw(1, 70)
    before = inputs["initial_state"].clone()
    op(**inputs)
    assert torch.equal(inputs["initial_state"], before)
    inputs["initial_state"] = torch.zeros_like(before)
    zeros = op(**inputs)
    del inputs["initial_state"]
    assert torch.equal(op(**inputs).out, zeros.out)


@pytest.mark.parametrize("op", OPS)
def test_a_change_leaves_the_past_bit_equal(op):
    inputs = draw(2, 100, dtype=torch.float32)
    out = op(**inputs).out
    for t in (0, 1, 50, 63, 64, 99):
        for name in ("q", "k", "v", "g"):
            other = inputs[name].clone()
            other[:, t:] -= 1.0
            changed = op(**{**inputs, name: other}).out
            assert torch.equal(changed[:, :t], out[:, :t]), f"{name} at {t} reached the past"
            assert not torch.equal(changed[:, t:], out[:, t:]), f"{name} at {t} reached nothing"


@pytest.mark.parametrize("op", OPS)
def test_padding_that_neither_writes_nor_forgets_leaves_the_state(op):
    inputs = draw(1, 9)
    inputs["k"][:, 6:], inputs["g"][:, 6:] = 0.0, 0.0
    assert_close(
        "state", op(**inputs).final_state, op(**tokens(inputs, 0, 6)).final_state, rtol=1e-12
    )


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_lose_only_the_rounding_of_the_output(op, dtype):
    inputs = draw(2, 70, dtype=dtype)
    out, state = op(**inputs)
    ref = op(**{name: x.double() for name, x in inputs.items()})
    assert out.dtype == dtype
    assert state.dtype == torch.float32
    assert_close("out", out, ref.out, rtol=5e-3)
    assert_close("final_state", state, ref.final_state, rtol=1e-5)


def test_autocast_leaves_the_products_of_states_in_float32():
    inputs = draw(2, 70, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = chunk_gla(**inputs).out
    assert torch.equal(out, chunk_gla(**inputs).out)


@pytest.mark.parametrize("op", OPS)
def test_no_tokens_give_the_initial_state(op):
    inputs = draw(2, 0, HQ=4, H=2)
    out, state = op(**inputs)
    assert out.shape == (2, 0, 4, 5)
    assert torch.equal(state, inputs["initial_state"])


def test_inputs_need_not_be_contiguous():
    inputs = draw(2, 70)
    turned = {n: x.transpose(1, 2).contiguous().transpose(1, 2) for n, x in inputs.items()}
    assert_close("out", chunk_gla(**turned).out, chunk_gla(**inputs).out, rtol=1e-12)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.any_shapes
def test_the_chunk_form_compiles_without_a_graph_break(packed):
    torch._dynamo.reset()
    inputs = draw(1, 70, states=2 if packed else 1)
    form = {"cu_seqlens": torch.tensor([0, 33, 70])} if packed else {}
    compiled = torch.compile(chunk_gla, fullgraph=True, backend="aot_eager")
    assert_close("out", compiled(**inputs, **form).out, chunk_gla(**inputs, **form).out, rtol=1e-12)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"q": torch.ones(2, 4, 3)}, ValueError, r"q must be \(B, T, HQ, K\), got \(2, 4, 3\)"),
        ({"k": torch.ones(2, 4, 3, 3)}, ValueError, r"k must be \(2, 4, H, 3\) with H a divisor"),
        ({"k": torch.ones(2, 4, 1, 2)}, ValueError, r"k must be \(2, 4, H, 3\)"),
        ({"k": torch.ones(2, 4, 0, 3)}, ValueError, r"k must be \(2, 4, H, 3\)"),
        ({"q": torch.ones(2, 4, 0, 3)}, ValueError, r"k must be \(2, 4, H, 3\)"),
        ({"v": torch.ones(2, 4, 1, 0)}, ValueError, "the last size of v must not be 0"),
        ({"v": torch.ones(2, 4, 2, 5)}, ValueError, r"v must be \(2, 4, 1, V\)"),
        ({"g": torch.ones(2, 4, 1, 2)}, ValueError, r"g must be \(2, 4, 1, 3\) or \(2, 4, 1, 1\)"),
        ({"g": torch.ones(2, 4, 1, 3).int()}, TypeError, "g must be floating-point .* got int32"),
        ({"v": torch.ones(2, 4, 1, 5).half()}, TypeError, "v must have the dtype of q"),
        ({"k": torch.ones(2, 4, 1, 3, device="meta")}, ValueError, "k is on meta, q on cpu"),
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


@pytest.mark.parametrize("op", OPS)
def test_borders_that_do_not_hold_all_tokens_are_refused(op):
    inputs = draw(1, 4, states=2)
    with pytest.raises(ValueError, match="end at T = 4, got"):
        op(**inputs, cu_seqlens=torch.tensor([0, 2, 3]))


@pytest.mark.any_shapes
def test_an_unknown_implementation_is_refused():
    with pytest.raises(ValueError, match="impl must be one of"):
        chunk_gla(**draw(1, 4), impl="cuda")
