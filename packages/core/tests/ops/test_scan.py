import itertools
import math
from importlib.util import find_spec

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mezzo_core.ops.scan import linear_scan
from mezzo_core.testing import assert_close, grads
from torch import Tensor
from torch._subclasses import FakeTensorMode

from .impls import DEVICE, NO_TRITON, impls

# Name: (B, T, chunk_size, lengths of packed sequences, whether there is an initial state).
CASES = {
    "whole": (2, 37, None, None, False),
    "whole, with a state": (2, 37, None, None, True),
    "chunked": (2, 37, 8, None, False),
    "chunked, with a state": (2, 37, 8, None, True),
    "chunks of one": (1, 5, 1, None, True),
    "one chunk, longer than T": (2, 7, 64, None, True),
    "packed": (1, 24, None, (0, 1, 15, 0, 1, 7, 0), False),
    "packed, with states": (1, 24, None, (0, 1, 15, 0, 1, 7, 0), True),
    "packed and chunked, with states": (1, 24, 4, (0, 1, 15, 0, 1, 7, 0), True),
    "one token": (3, 1, None, None, True),
    "no token": (2, 0, 4, None, True),
}
WHOLE = {"chunk_size": None, "cu_seqlens": None}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def problem(case, D=5, dtype=torch.float32, device="cpu", seed=0):
    """Random inputs of a case, its keyword arguments, and gradients of the two outputs."""
    B, T, chunk_size, lengths, with_state = case
    draw = torch.Generator(device).manual_seed(seed)
    new = {"device": device, "generator": draw}
    num_states = B if lengths is None else len(lengths)
    accumulated = torch.float64 if dtype == torch.float64 else torch.float32
    inputs = {
        "a": torch.rand(B, T, D, **new).to(dtype),
        "x": torch.randn(B, T, D, **new).to(dtype),
        "initial_state": torch.randn(num_states, D, **new).to(accumulated) if with_state else None,
    }
    borders = None
    if lengths is not None:
        borders = torch.tensor([0, *itertools.accumulate(lengths)], device=device)
    dout = torch.randn(B, T, D, **new).to(dtype)
    dfinal = torch.randn(num_states, D, **new).to(accumulated)
    return inputs, {"chunk_size": chunk_size, "cu_seqlens": borders}, (dout, dfinal)


def recurrence(a, x, initial_state, chunk_size, cu_seqlens):
    """The definition, token by token, differentiated by autograd."""
    if cu_seqlens is not None:
        runs = [
            (slice(s, e), i) for i, (s, e) in enumerate(itertools.pairwise(cu_seqlens.tolist()))
        ]
        outs, finals = [], []
        for tokens, i in runs:
            state = None if initial_state is None else initial_state[i : i + 1]
            out, final = recurrence(a[:, tokens], x[:, tokens], state, chunk_size, None)
            outs.append(out)
            finals.append(final)
        return torch.cat(outs, 1), torch.cat(finals)
    h = torch.zeros_like(x[:, :1].sum(1)) if initial_state is None else initial_state
    out = []
    for t in range(x.shape[1]):
        if chunk_size and t % chunk_size == 0 and t > 0:
            h = torch.zeros_like(h)
        h = a[:, t] * h + x[:, t]
        out.append(h)
    return (torch.stack(out, 1) if out else x.clone()), h


def scan(impl="auto", **options):
    return lambda a, x, initial_state: linear_scan(
        a, x, initial_state=initial_state, impl=impl, **options
    )


def assert_same(got, expected, *, rtol, low=None, rtol_a=None, atol=0.0):
    """Compare (outputs, gradients) pairs; float32 results of low inputs keep float32's rule."""
    found, wanted, lows = (flat(pair) for pair in (got, expected, low or expected))
    for name, value in found.items():
        exact = value.dtype == torch.float32 and low is not None
        allowed = rtol_a or rtol if name == "da" else rtol
        assert_close(
            name,
            value,
            wanted[name],
            rtol=1e-5 if exact else allowed,
            low=None if exact or low is None else lows[name],
            factor=3.0 if name.startswith("d") else 2.0,
            atol=atol,
        )


def flat(pair) -> dict[str, Tensor]:
    (out, final_state), gradients = pair
    return {"out": out, "final_state": final_state} | {f"d{k}": g for k, g in gradients.items()}


@impls
@cases
def test_scan_is_the_recurrence_with_all_its_gradients(case, impl):
    inputs, options, dout = problem(case, dtype=torch.float64, device=DEVICE)
    expected = grads(lambda **given: recurrence(**given, **options), inputs, dout)
    assert_same(grads(scan(impl, **options), inputs, dout), expected, rtol=1e-12)


@settings(max_examples=settings().max_examples // 6)
@given(
    st.integers(1, 2),
    st.sampled_from([1, 16, 17, 63, 100]),
    st.sampled_from([1, 2, 12]),
    st.sampled_from([None, 1, 5, 16, 100]),
    st.booleans(),
    st.integers(0, 1000),
)
@example(1, 17, 130, 16, True, 0)
@example(2, 600, 1, 16, True, 0)
def test_triton_equals_the_reference(B, T, D, chunk_size, with_state, seed):
    pytest.importorskip("triton")
    inputs, options, dout = problem(
        (B, T, chunk_size, None, with_state), D, device=DEVICE, seed=seed
    )
    expected = grads(scan("reference", **options), inputs, dout)
    found = grads(scan("triton", **options), inputs, dout)
    atol = 1e-7 if B * D < 4 else 0.0  # all numbers of a state may be near zero
    assert_same(found, expected, rtol=1e-6, atol=atol)


@settings(max_examples=settings().max_examples // 5)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=6),
    st.sampled_from([None, 1, 4, 16]),
    st.booleans(),
    st.integers(0, 1000),
)
def test_a_packed_sequence_equals_itself_alone(lengths, chunk_size, with_state, seed):
    inputs, options, _ = problem((1, sum(lengths), chunk_size, lengths, with_state), seed=seed)
    given = {k: v if v is None else v.to(DEVICE) for k, v in inputs.items()}
    options["cu_seqlens"] = options["cu_seqlens"].to(DEVICE, torch.int32)
    for impl in ["reference", "triton"] if find_spec("triton") else ["reference"]:
        out, final_state = linear_scan(**given, **options, impl=impl)
        start = 0
        for i, length in enumerate(lengths):
            tokens = slice(start, start := start + length)
            state = given["initial_state"]
            alone = linear_scan(
                given["a"][:, tokens],
                given["x"][:, tokens],
                initial_state=None if state is None else state[i : i + 1],
                chunk_size=chunk_size,
                impl=impl,
            )
            assert_close("out", out[:, tokens], alone.out, rtol=1e-6)
            assert_close("final_state", final_state[i : i + 1], alone.final_state, rtol=1e-6)


@settings(max_examples=settings().max_examples // 6)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=5), st.integers(0, 1000))
def test_segments_with_their_states_equal_the_whole(splits, seed):
    inputs, _, _ = problem((2, sum(splits), None, None, True), seed=seed)
    whole = linear_scan(**inputs)
    state, outs = inputs["initial_state"], []
    for a, x in zip(inputs["a"].split(splits, 1), inputs["x"].split(splits, 1), strict=True):
        out, state = linear_scan(a, x, initial_state=state)
        outs.append(out)
    assert torch.equal(torch.cat(outs, 1), whole.out)
    assert torch.equal(state, whole.final_state)


@impls
def test_chunks_are_scans_on_their_own(impl):
    inputs, _, _ = problem((2, 600, None, None, False), device=DEVICE)
    out, final_state = linear_scan(**inputs, chunk_size=150, impl=impl)
    alone = [
        linear_scan(a, x, impl=impl)
        for a, x in zip(inputs["a"].split(150, 1), inputs["x"].split(150, 1), strict=True)
    ]
    assert_close("out", out, torch.cat([part.out for part in alone], 1), rtol=1e-6)
    assert_close("final_state", final_state, alone[-1].final_state, rtol=1e-6)


@impls
def test_the_future_and_other_rows_change_nothing(impl):
    inputs, _, _ = problem((2, 50, None, None, True), device=DEVICE)
    out = linear_scan(**inputs, impl=impl).out
    changed = {k: v.clone() for k, v in inputs.items()}
    for name in ("a", "x"):
        changed[name][0, 20:] = -7.0
    again = linear_scan(**changed, impl=impl).out
    assert torch.equal(again[0, :20], out[0, :20])
    assert not torch.equal(again[0, 20:], out[0, 20:])
    assert torch.equal(again[1], out[1])
    one = linear_scan(**{k: v[1:] for k, v in inputs.items()}, impl=impl).out
    assert torch.equal(one[0], out[1])


@impls
@pytest.mark.parametrize("gate", [0.0, math.exp(-1e-4), math.exp(-50), 1.0])
def test_extreme_gates_are_exact_and_their_gradients_finite(gate, impl):
    inputs, options, dout = problem((1, 100, None, None, True), dtype=torch.float64, device=DEVICE)
    inputs["a"] = torch.full_like(inputs["a"], gate)
    expected = grads(lambda **given: recurrence(**given, **options), inputs, dout)
    single = {k: v.float() for k, v in inputs.items()}
    got = grads(scan(impl), single, tuple(d.float() for d in dout))
    assert_same(got, expected, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("chunk_size", [None, 1000])
def test_rounding_does_not_grow_over_65_537_tokens(chunk_size, impl):
    inputs, options, dout = problem((1, 65_537, chunk_size, None, True), 2, device=DEVICE)
    inputs["a"] = 1 - 1e-3 * inputs["a"]
    exact = {k: v.double() for k, v in inputs.items()}
    expected = grads(scan("reference", **options), exact, tuple(d.double() for d in dout))
    assert_same(grads(scan(impl, **options), inputs, dout), expected, rtol=1e-5)


@impls
def test_strides_do_not_matter(impl):
    inputs, options, (dout, dfinal) = problem((2, 21, 8, None, True), 8, device=DEVICE)
    expected = grads(scan(impl, **options), inputs, (dout, dfinal))
    strided = {
        "a": inputs["a"].transpose(1, 2).contiguous().transpose(1, 2),
        "x": torch.cat([inputs["x"], inputs["x"]], -1)[..., 8:],
        "initial_state": inputs["initial_state"].t().contiguous().t(),
    }
    assert not any(t.is_contiguous() for t in strided.values())
    assert_same(grads(scan(impl, **options), strided, (dout, dfinal)), expected, rtol=1e-6)
    ones = torch.ones((), device=DEVICE).expand(2, 21, 8)
    out, final = linear_scan(ones, ones, impl=impl)
    assert_close("counts", out[0, :, 0], torch.arange(1.0, 22.0, device=DEVICE), rtol=0)
    assert final.eq(21).all()


@impls
def test_borders_may_lie_apart(impl):
    inputs, options, _ = problem((1, 9, None, (2, 0, 7), True), device=DEVICE)
    expected = linear_scan(**inputs, **options, impl=impl)
    options["cu_seqlens"] = options["cu_seqlens"].repeat_interleave(2)[::2]
    assert all(map(torch.equal, linear_scan(**inputs, **options, impl=impl), expected))


@NO_TRITON
def test_kernels_write_nothing_beyond_the_row_whatever_the_borders_are():
    from mezzo_core.ops.scan.triton import linear_scan_fwd_kernel, tl

    room, final = torch.zeros(3, 8, 4, device=DEVICE), torch.zeros(1, 4, device=DEVICE)
    ones, borders = torch.ones_like(room), torch.tensor([-8, 16], device=DEVICE)
    linear_scan_fwd_kernel[1,](
        ones[1], ones[1], None, borders, room[1], final, 8, 1, 24, 0, 4, 0, 4,
        D=4, BT=8, BD=4, ACC=tl.float32, L=0, PACKED=True, HAS_STATE=False,
    )  # fmt: skip
    assert room.amax((1, 2)).tolist() == [0, 8, 0]
    assert final.eq(8).all()


def test_trailing_axes_are_channels():
    inputs, _, _ = problem((2, 9, None, None, True), 12)
    flat_out = linear_scan(**inputs)
    folded = {k: v.unflatten(-1, (3, 4)) for k, v in inputs.items()}
    out, final_state = linear_scan(**folded)
    assert torch.equal(out.flatten(2), flat_out.out)
    assert torch.equal(final_state.flatten(1), flat_out.final_state)
    scalar = linear_scan(**{k: v[..., 0] for k, v in inputs.items()})
    assert torch.equal(scalar.out, flat_out.out[..., 0])
    assert scalar.final_state.shape == (2,)


@impls
def test_one_decay_of_a_head_is_for_all_its_channels(impl):
    a, x = torch.rand(2, 9, 3, 1).double().to(DEVICE), torch.randn(2, 9, 3, 4).double().to(DEVICE)
    inputs, pull = {"a": a, "x": x, "initial_state": x[:, 0]}, (x.sin(), x[:, 1].cos())
    expected = grads(lambda **given: recurrence(**given, **WHOLE), inputs, pull)
    assert_same(grads(scan(impl), inputs, pull), expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_inputs_accumulate_in_float32(dtype):
    inputs, _, _ = problem((1, 200, None, None, True), dtype=dtype)
    out, final_state = linear_scan(**inputs)
    exact = linear_scan(**{k: v.float() for k, v in inputs.items()})
    assert out.dtype == dtype
    assert torch.equal(out, exact.out.to(dtype))
    assert final_state.dtype == torch.float32
    assert torch.equal(final_state, exact.final_state)


@impls
def test_each_gradient_of_the_registered_op_has_the_dtype_of_its_input(impl):
    inputs, options, (dout, dfinal) = problem(CASES["chunked, with a state"], device=DEVICE)
    for wide in ("a", "x"):
        a, x = (inputs[name].to(torch.float32 if name == wide else torch.float16) for name in "ax")
        given = (dout.to(x), dfinal, a, x, inputs["initial_state"], None, options["chunk_size"])
        found = torch.ops.mezzo.linear_scan_bwd(*given, impl)
        assert [d.dtype for d in found] == [a.dtype, x.dtype, torch.float32]


@impls
def test_states_and_their_gradients_lie_in_memory_as_torch_compile_is_told(impl):
    inputs, _, (dout, dfinal) = problem(CASES["whole, with a state"], device=DEVICE)
    a, x, h0 = inputs.values()
    h0, dfinal = (state.t().contiguous().t() for state in (h0, dfinal))
    ops, rest = torch.ops.mezzo, (None, 0, impl)
    calls = (ops.linear_scan, (a, x, h0)), (ops.linear_scan_bwd, (dout, dfinal, a, x, h0))
    for op, tensors in calls:
        found = op(*tensors, *rest)
        with FakeTensorMode(allow_non_fake_inputs=True):
            told = op(*tensors, *rest)
        assert [each.stride() for each in found] == [each.stride() for each in told]


@cases
def test_gradcheck(case):
    inputs, options, _ = problem(case, D=2, dtype=torch.float64)
    leaves = [v if v is None else v.requires_grad_() for v in inputs.values()]
    assert torch.autograd.gradcheck(scan("reference", **options), leaves)


@impls
@pytest.mark.parametrize("name", ["whole", "chunked, with a state", "packed, with states"])
def test_opcheck(name, impl):
    inputs, options, dout = problem(CASES[name], device=DEVICE)
    for value in inputs.values():
        if value is not None:
            value.requires_grad_()
    args = (*inputs.values(), options["cu_seqlens"], options["chunk_size"] or 0, impl)
    torch.library.opcheck(torch.ops.mezzo.linear_scan.default, args)
    a, x, *rest = (v.detach() if isinstance(v, Tensor) else v for v in args)
    fakes = ("test_schema", "test_faketensor")  # AOTAutograd traces it with the forward
    its = (*dout, a, x, *rest)
    torch.library.opcheck(torch.ops.mezzo.linear_scan_bwd.default, its, test_utils=fakes)


@impls
@pytest.mark.parametrize("name", ["chunked, with a state", "packed, with states"])
@pytest.mark.any_shapes
def test_compiles_to_one_graph(name, impl):
    inputs, options, dout = problem(CASES[name], device=DEVICE)
    expected = grads(scan(impl, **options), inputs, dout)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(scan(impl, **options), fullgraph=True, backend=backend)
    assert_same(grads(compiled, inputs, dout), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (
            ValueError,
            r"a and x must have one shape.*\(2, 6, 3\) and x \(2, 5, 3\)",
            {"x": torch.ones(2, 5, 3)},
        ),
        (ValueError, r"axes of 1 after T.*\(1, 6, 3\)", {"a": torch.ones(1, 6, 3)}),
        (ValueError, "x is on cpu|a is on meta", {"a": torch.ones(2, 6, 3, device="meta")}),
        (ValueError, "one shape", {"a": torch.ones(6), "x": torch.ones(6)}),
        (
            ValueError,
            r"initial_state must be \(2, 3\), got \(3,\)",
            {"initial_state": torch.ones(3)},
        ),
        (ValueError, "into one row, got B = 2", {"cu_seqlens": torch.tensor([0, 6])}),
    ],
)
@pytest.mark.any_shapes
def test_bad_arguments_are_named(error, message, changes):
    """Others are in tests/test_arguments.py."""
    given = {"a": torch.ones(2, 6, 3), "x": torch.ones(2, 6, 3)} | changes
    with pytest.raises(error, match=message):
        linear_scan(given.pop("a"), given.pop("x"), **given)


@pytest.mark.parametrize("borders", [[0, 5], [1, 6], [0, 4, 3, 6], [0, 7, 6]])
def test_borders_that_do_not_cover_the_row_are_refused(borders):
    one = torch.ones(1, 6, 3)
    with pytest.raises(ValueError, match="start at 0, never decrease and end at T = 6"):
        linear_scan(one, one, cu_seqlens=torch.tensor(borders))


GPU_CASES = {
    "whole": (4, 4097, None, None, True),
    "chunks of 16": (4, 4097, 16, None, True),
    "chunks of 100": (2, 5000, 100, None, False),
    "packed": (1, 5000, None, (0, 1, 2500, 0, 1, 2498, 0), True),
    "packed, chunks of 16": (1, 5000, 16, (0, 1, 2500, 0, 1, 2498, 0), True),
    "70,001 tokens": (1, 70_001, None, None, True),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [32, 96, 1000])
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES.keys())
def test_triton_on_a_gpu_equals_the_reference(case, D, dtype):
    inputs, options, dout = problem(case, D, dtype=dtype, device="cuda")
    exact = {k: v if v is None else v.float() for k, v in inputs.items()}
    expected = grads(scan("reference", **options), exact, tuple(d.float() for d in dout))
    got = grads(scan("triton", **options), inputs, dout)
    if dtype == torch.float32:
        assert_same(got, expected, rtol=1e-5)
    else:
        low = grads(scan("reference", **options), inputs, dout)
        assert_same(got, expected, rtol=5e-3, rtol_a=8e-3, low=low)
    for name, again in flat(grads(scan("triton", **options), inputs, dout)).items():
        assert torch.equal(again, flat(got)[name]), f"{name} differs when repeated"


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_size", [None, 16])
def test_more_than_two_to_the_31_elements(chunk_size):
    T, D, tail = 262_144, 8200, 64
    inputs, options, dout = problem(
        (1, T, chunk_size, None, True), D, dtype=torch.bfloat16, device="cuda"
    )
    (out, final_state), found = grads(scan("triton", **options), inputs, dout)
    end = {
        "a": inputs["a"][:, -tail:].float(),
        "x": inputs["x"][:, -tail:].float(),
        # A chunk starts at the tail, so there the state is zero.
        "initial_state": out[:, -tail - 1].float() * (chunk_size is None),
    }
    pull = (dout[0][:, -tail:].float(), dout[1])
    (out_end, final_end), found_end = grads(scan("reference", **options), end, pull)
    assert_close("final_state", final_state, final_end, rtol=5e-3)
    assert_close("out", out[:, -tail:], out_end, rtol=5e-3)
    assert_close("dx", found["x"][:, -tail:], found_end["x"], rtol=5e-3)
    assert_close("da", found["a"][:, -tail:], found_end["a"], rtol=8e-3)
