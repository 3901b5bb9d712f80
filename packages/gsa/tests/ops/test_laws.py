"""The laws of gated linear attention and of gated slot attention, in both forms of each.

Those of kernels, at the end, run in the interpreter, or on a GPU.
"""

from functools import partial
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.testing import assert_close, grads
from mezzo_gsa.ops.gla import chunk_gla, recurrent_gla
from mezzo_gsa.ops.gsa import chunk_gsa, recurrent_gsa

from .inputs import GATES, assert_same, call, draw_gla, draw_gsa, states, tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
draw_strengths = partial(draw_gsa, strength=True)
CASES = {
    "gla": (chunk_gla, draw_gla),
    "gla-head": (chunk_gla, partial(draw_gla, gate="head")),
    "gla-recurrent": (recurrent_gla, draw_gla),
    "gsa": (chunk_gsa, draw_gsa),
    "gsa-recurrent": (recurrent_gsa, draw_gsa),
    "gsa-strengths": (chunk_gsa, draw_strengths),
    "gsa-strengths-recurrent": (recurrent_gsa, draw_strengths),
}


def of_cases(*names):
    return pytest.mark.parametrize(("op", "draw"), [CASES[name] for name in names], ids=names)


cases = of_cases(*CASES)
every_input = of_cases("gla", "gla-recurrent", "gsa-strengths", "gsa-strengths-recurrent")
families = pytest.mark.parametrize(
    ("ops", "draw", "options"),
    [
        (
            (chunk_gla, recurrent_gla),
            draw_gla,
            st.fixed_dictionaries({"gate": st.sampled_from(["channel", "head"])}),
        ),
        (
            (chunk_gsa, recurrent_gsa),
            draw_gsa,
            st.fixed_dictionaries({"gates": st.sampled_from(GATES), "strength": st.booleans()}),
        ),
    ],
    ids=["gla", "gsa"],
)


@every_input
def test_packed_gradients_are_those_of_finite_differences(op, draw, monkeypatch):
    for name in ("gla", "gsa"):
        monkeypatch.setattr(f"mezzo_gsa.ops.{name}.chunked.CHUNK", 2)  # several, few numbers
    inputs = draw(1, 6, K=2, V=2, states=4)
    values = [x.requires_grad_() for x in inputs.values()]
    borders = torch.tensor([0, 1, 1, 5, 6])
    assert torch.autograd.gradcheck(
        lambda *xs: call(op, **dict(zip(inputs, xs, strict=True)), cu_seqlens=borders), values
    )


@cases
def test_query_heads_read_the_head_of_their_group(op, draw):
    inputs = draw(2, 70, HQ=4, H=2)
    spread = {name: x.repeat_interleave(2, 2) for name, x in tokens(inputs).items() if name != "q"}
    spread |= {name: x.repeat_interleave(2, 1) for name, x in states(inputs).items()}
    alone = call(op, **inputs | spread)[0]
    assert_close("out", call(op, **inputs)[0], alone, rtol=1e-12)


@families
@settings(max_examples=settings().max_examples // 6)
@given(
    data=st.data(),
    lengths=st.lists(st.integers(0, 80), min_size=1, max_size=6).filter(any),
    borders_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_packed_sequences_equal_each_alone_with_all_gradients(
    ops, draw, options, data, lengths, borders_dtype
):
    borders = [0, *accumulate(lengths)]
    inputs = draw(1, borders[-1], states=len(lengths), **data.draw(options))
    cu_seqlens = torch.tensor(borders, dtype=borders_dtype)

    def alone(**x):
        parts = []
        for i, (a, b) in enumerate(pairwise(borders)):
            own = {name: state[i : i + 1] for name, state in states(x).items()}
            parts.append(call(ops[0], **tokens(x, a, b), **own))
        outs, *last = zip(*parts, strict=True)
        return torch.cat(outs, 1), *map(torch.cat, last)

    for op in ops:
        assert_same(partial(call, op, cu_seqlens=cu_seqlens), alone, inputs)


@families
@settings(max_examples=settings().max_examples // 5)
@given(
    data=st.data(),
    splits=st.lists(st.integers(0, 90), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_segments_through_a_state_equal_the_whole(ops, draw, options, data, splits, seed):
    inputs = draw(2, sum(splits), seed=seed, **data.draw(options))
    whole = call(ops[0], **inputs)
    for op in ops:
        state, outs = states(inputs), []
        for end, length in zip(accumulate(splits), splits, strict=True):
            out, *last = call(op, **tokens(inputs, end - length, end), **state)
            state = dict(zip(state, last, strict=True))
            outs.append(out)
        found = torch.cat(outs, 1), *state.values()
        for name, x, ref in zip(("out", *state), found, whole, strict=True):
            assert_close(name, x, ref, rtol=1e-10)


@every_input
def test_a_change_leaves_the_past_bit_equal(op, draw):
    inputs = draw(2, 100, dtype=torch.float32)
    out = call(op, **inputs)[0]
    for t in (0, 1, 50, 63, 64, 99):
        for name, x in tokens(inputs).items():
            other = x.clone()
            other[:, t:] -= 1.0
            changed = call(op, **inputs | {name: other})[0]
            assert torch.equal(changed[:, :t], out[:, :t]), f"{name} at {t} reached the past"
            assert not torch.equal(changed[:, t:], out[:, t:]), f"{name} at {t} reached nothing"


@cases
def test_the_initial_state_is_not_overwritten_and_defaults_to_zeros(op, draw):
    inputs = draw(1, 70)
    before = {name: x.clone() for name, x in states(inputs).items()}
    call(op, **inputs)
    assert all(torch.equal(inputs[name], x) for name, x in before.items())
    zeros = call(op, **inputs | {name: torch.zeros_like(x) for name, x in before.items()})
    without = call(op, **tokens(inputs))
    assert all(torch.equal(a, b) for a, b in zip(without, zeros, strict=True))


@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_lose_only_the_rounding_of_the_output(op, draw, dtype):
    inputs = draw(2, 70, dtype=dtype)
    out, *last = call(op, **inputs)
    ref, *last_ref = call(op, **{name: x.double() for name, x in inputs.items()})
    assert out.dtype == dtype
    assert_close("out", out, ref, rtol=5e-3)
    for x, y in zip(last, last_ref, strict=True):
        assert x.dtype == torch.float32
        assert_close("state", x, y, rtol=1e-5)


@cases
def test_autocast_leaves_the_products_of_states_in_float32(op, draw):
    inputs = draw(2, 70, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = call(op, **inputs)[0]
    assert torch.equal(out, call(op, **inputs)[0])


@cases
def test_no_tokens_give_a_copy_of_the_initial_state(op, draw):
    inputs = draw(2, 0, HQ=4, H=2)
    out, *last = call(op, **inputs)
    assert out.shape == (2, 0, 4, 5)
    for old, new in zip(states(inputs).values(), last, strict=True):
        assert torch.equal(old, new)
        assert old.data_ptr() != new.data_ptr()


@cases
def test_inputs_need_not_be_contiguous(op, draw):
    inputs = draw(2, 70)
    turned = {name: x.transpose(1, 2).contiguous().transpose(1, 2) for name, x in inputs.items()}
    assert_close("out", call(op, **turned)[0], call(op, **inputs)[0], rtol=1e-12)


def draw_on_device(draw, *sizes, dtype=torch.float32):
    return {name: x.to(DEVICE) for name, x in draw(*sizes, K=16, V=24, dtype=dtype).items()}


@of_cases("gla", "gla-head", "gsa")
def test_a_gate_of_a_kernel_that_is_not_a_number_shows(op, draw):
    inputs = draw_on_device(draw, 1, 80, 2, 2)
    inputs["g"][0, 3, 0, 0] = float("nan")
    out, state, *_ = call(op, **inputs, impl="triton")
    assert out[0, 3:, 0].isnan().all()
    assert state[0, 0].isnan().any()
    assert out[0, :, 1].isfinite().all(), "heads are apart"


@of_cases("gla", "gsa")
def test_kernels_read_single_tokens_of_turned_batches_where_they_are(op, draw):
    inputs = tokens(draw_on_device(draw, 1, 3, 2, 2))
    turned = {name: x.transpose(0, 1) for name, x in inputs.items()}  # (3, 1, H, ·)
    ours, ref = (call(op, **turned, impl=impl) for impl in ("triton", "reference"))
    for x, y in zip(ours, ref, strict=True):
        assert_close("result", x, y, rtol=1e-5)


@of_cases("gla", "gsa")
def test_gradients_of_kernels_come_through_one_result_alone_and_without_a_state(op, draw):
    inputs = draw_on_device(draw, 1, 40)
    kernels, reference = (partial(call, op, impl=impl) for impl in ("triton", "reference"))
    shapes = [x.shape for x in kernels(**inputs)]
    for through, shape in enumerate(shapes):
        pull = [None] * len(shapes)
        pull[through] = torch.randn(shape).to(DEVICE)
        for x in (inputs, tokens(inputs)) if through == 1 else (tokens(inputs),):
            truth, found = (grads(fn, x, tuple(pull))[1] for fn in (reference, kernels))
            for name, expected in truth.items():
                assert_close(f"d{name}", found[name], expected, rtol=1e-5, atol=1e-6)


@of_cases("gla", "gsa")
def test_gradients_of_states_by_kernels_can_be_wanted_alone_and_spread_out(op, draw):
    inputs = draw_on_device(draw, 1, 3)
    kernels = partial(call, op, impl="triton")
    pull = tuple(torch.randn(x.shape).to(DEVICE) for x in kernels(**inputs))
    results, expected = grads(kernels, inputs, pull)
    spread = {name: x.mT.contiguous().mT for name, x in states(inputs).items()}
    pull = pull[0], *(x.mT.contiguous().mT for x in pull[1:])
    again, found = grads(partial(kernels, **tokens(inputs)), spread, pull)
    for name, x in found.items():
        assert torch.equal(x, expected[name]), name
    assert all(map(torch.equal, again, results))
