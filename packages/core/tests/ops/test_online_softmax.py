import math
from importlib.util import find_spec

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.ops.online_softmax import SoftmaxPart, merge_softmax
from mezzo_core.testing import assert_close, grads

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = [
    "reference",
    pytest.param("triton", marks=pytest.mark.skipif(find_spec("triton") is None, reason="triton")),
]
impls = pytest.mark.parametrize("impl", IMPLS)
EMPTY = {"neither": (), "a": ("lse_a",), "b": ("lse_b",), "both": ("lse_a", "lse_b")}


def problem(shape=(2, 5, 3, 8), dtype=torch.float32, device=DEVICE, seed=0):
    """Random inputs by name, and gradients of both outputs."""
    draw = torch.Generator(device).manual_seed(seed)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*sizes):
        return torch.randn(*sizes, generator=draw, device=device)

    inputs = {
        "out_a": normal(*shape).to(dtype),
        "lse_a": 3 * normal(*shape[:-1]).to(lse_dtype),
        "out_b": normal(*shape).to(dtype),
        "lse_b": 3 * normal(*shape[:-1]).to(lse_dtype),
    }
    return inputs, (normal(*shape).to(dtype), normal(*shape[:-1]).to(lse_dtype))


def merge(impl="auto"):
    def merged(out_a, lse_a, out_b, lse_b):
        return merge_softmax(SoftmaxPart(out_a, lse_a), SoftmaxPart(out_b, lse_b), impl=impl)

    return merged


def attend(logits, values):
    """Softmax attention over some keys: logits (B, T, H, S), values (B, S, H, D)."""
    return SoftmaxPart(
        torch.einsum("bths,bshd->bthd", logits.softmax(-1), values), logits.logsumexp(-1)
    )


def assert_same(got, expected, *, rtol, low=None):
    """Compare (outputs, gradients) pairs; float32 results of low inputs keep float32's rule."""
    for name, value in flat(got).items():
        exact = value.dtype == torch.float32
        assert_close(
            name,
            value,
            flat(expected)[name],
            rtol=min(rtol, 1e-5) if exact else rtol,
            low=None if exact or low is None else flat(low)[name],
        )


def flat(pair) -> dict:
    (out, lse), gradients = pair
    return {"out": out, "lse": lse} | {f"d{name}": value for name, value in gradients.items()}


@impls
@pytest.mark.parametrize("cut", [1, 6, 10])
def test_merging_parts_is_softmax_over_all_keys(cut, impl):
    logits, values = (
        torch.randn(2, 5, 3, 11, device=DEVICE),
        torch.randn(2, 11, 3, 8, device=DEVICE),
    )
    whole = attend(logits.double(), values.double())
    parts = [
        attend(part, value)
        for part, value in zip(
            logits.split([cut, 11 - cut], -1), values.split([cut, 11 - cut], 1), strict=True
        )
    ]
    merged = merge_softmax(*parts, impl=impl)
    assert_close("out", merged.out, whole.out, rtol=1e-6)
    assert_close("lse", merged.lse, whole.lse, rtol=1e-6)


@impls
def test_gradients_through_a_merge_are_those_of_the_softmax_over_all_keys(impl):
    inputs = {
        "logits": torch.randn(2, 5, 3, 11, device=DEVICE),
        "values": torch.randn(2, 11, 3, 8, device=DEVICE),
    }

    def in_parts(logits, values):
        return merge_softmax(
            attend(logits[..., :4], values[:, :4]),
            attend(logits[..., 4:], values[:, 4:]),
            impl=impl,
        )

    dout = (torch.randn(2, 5, 3, 8, device=DEVICE), torch.randn(2, 5, 3, device=DEVICE))
    expected = grads(attend, inputs, dout)
    assert_same(grads(in_parts, inputs, dout), expected, rtol=3e-6)


@settings(max_examples=20, deadline=None)
@given(
    st.tuples(st.integers(1, 2), st.sampled_from([1, 7]), st.integers(1, 3), st.integers(1, 40)),
    st.sampled_from(list(EMPTY)),
    st.integers(0, 1000),
)
def test_triton_equals_the_reference(shape, empty, seed):
    pytest.importorskip("triton")
    inputs, dout = problem(shape, seed=seed)
    for name in EMPTY[empty]:
        inputs[name][:, 0] = -math.inf
    expected = grads(merge("reference"), inputs, dout)
    got = grads(merge("triton"), inputs, dout)
    for name in ("out", "lse"):
        assert_close(name, getattr(got[0], name), getattr(expected[0], name), rtol=1e-6, atol=1e-6)
    for name, gradient in got[1].items():
        assert_close(f"d{name}", gradient, expected[1][name], rtol=1e-6, atol=1e-6)


@impls
def test_merging_is_commutative_and_associative(impl):
    (x, _), (y, _) = problem(), problem(seed=1)
    a, b = SoftmaxPart(x["out_a"], x["lse_a"]), SoftmaxPart(x["out_b"], x["lse_b"])
    c = SoftmaxPart(y["out_a"], y["lse_a"])
    for name, left, right in [
        ("a + b", merge_softmax(a, b, impl=impl), merge_softmax(b, a, impl=impl)),
        (
            "a + b + c",
            merge_softmax(merge_softmax(a, b, impl=impl), c, impl=impl),
            merge_softmax(a, merge_softmax(b, c, impl=impl), impl=impl),
        ),
    ]:
        assert_close(f"out of {name}", left.out, right.out, rtol=1e-6)
        assert_close(f"lse of {name}", left.lse, right.lse, rtol=1e-6)


@impls
@pytest.mark.parametrize("rubbish", [0.0, 5.0, math.nan, math.inf])
def test_a_part_without_keys_is_neutral_whatever_it_holds(rubbish, impl):
    inputs, dout = problem()
    inputs["lse_b"].fill_(-math.inf)
    inputs["out_b"].fill_(rubbish)
    for order in (("a", "b"), ("b", "a")):
        renamed = {
            f"{kind}_{new}": inputs[f"{kind}_{old}"]
            for new, old in zip("ab", order, strict=True)
            for kind in ("out", "lse")
        }
        (out, lse), found = grads(merge(impl), renamed, dout)
        full, empty = ("a", "b") if order == ("a", "b") else ("b", "a")
        assert torch.equal(out, inputs["out_a"])
        assert_close("lse", lse, inputs["lse_a"], rtol=1e-6)
        assert torch.equal(found[f"out_{full}"], dout[0])
        assert torch.equal(found[f"lse_{full}"], dout[1])
        assert not found[f"out_{empty}"].any()
        assert not found[f"lse_{empty}"].any()


@impls
def test_two_parts_without_keys_make_another_with_zero_gradients(impl):
    inputs, dout = problem()
    inputs["lse_a"].fill_(-math.inf)
    inputs["lse_b"].fill_(-math.inf)
    (out, lse), found = grads(merge(impl), inputs, dout)
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()
    for name, gradient in found.items():
        assert torch.equal(gradient, torch.zeros_like(gradient)), name


@impls
@pytest.mark.parametrize("shift", [-1e4, 0.0, 1e4])
def test_large_logits_neither_overflow_nor_vanish(shift, impl):
    inputs, _ = problem()
    expected = merge(impl)(**inputs)
    inputs["lse_a"] = inputs["lse_a"] + shift
    inputs["lse_b"] = inputs["lse_b"] + shift
    shifted = merge(impl)(**inputs)
    # The shift rounds each lse to 1e-3 here; the merge must add nothing to that.
    exact = merge("reference")(**{k: v.double() for k, v in inputs.items()})
    assert_close("out", shifted.out, exact.out, rtol=1e-6)
    assert_close("lse", shifted.lse, exact.lse, rtol=1e-6)
    assert_close("out, not shifted", shifted.out, expected.out, rtol=1e-3)


@impls
def test_strides_do_not_matter_and_leading_axes_are_free(impl):
    inputs, dout = problem()
    expected = grads(merge(impl), inputs, dout)
    strided = {k: v.transpose(1, 2).contiguous().transpose(1, 2) for k, v in inputs.items()}
    assert not any(v.is_contiguous() for v in strided.values())
    assert_same(grads(merge(impl), strided, dout), expected, rtol=1e-7)
    folded = merge(impl)(**{k: v.flatten(0, 2) for k, v in inputs.items()})
    assert torch.equal(folded.out, expected[0].out.flatten(0, 2))
    nothing = merge(impl)(**{k: v[:0] for k, v in inputs.items()})
    assert nothing.out.shape == (0, 5, 3, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_merges_in_float32(dtype):
    inputs, _ = problem(dtype=dtype)
    merged = merge("reference")(**inputs)
    exact = merge("reference")(**{k: v.float() for k, v in inputs.items()})
    assert merged.out.dtype == dtype
    assert torch.equal(merged.out, exact.out.to(dtype))
    assert torch.equal(merged.lse, exact.lse)


def test_gradcheck():
    inputs, _ = problem((1, 2, 2, 3), torch.float64, "cpu")
    inputs["lse_a"][0, 0, 0] -= 40.0
    assert torch.autograd.gradcheck(merge(), [v.requires_grad_() for v in inputs.values()])


@impls
def test_opcheck(impl):
    inputs, dout = problem()
    args = (*(v.requires_grad_() for v in inputs.values()), impl)
    torch.library.opcheck(torch.ops.mezzo.merge_softmax.default, args)
    args = (*dout, *(v.detach() for v in inputs.values()), impl)
    torch.library.opcheck(torch.ops.mezzo.merge_softmax_bwd.default, args)


@impls
def test_compiles_to_one_graph(impl):
    inputs, dout = problem()
    expected = grads(merge(impl), inputs, dout)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(merge(impl), fullgraph=True, backend=backend)
    assert_same(grads(compiled, inputs, dout), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (
            TypeError,
            "a.out and b.out must have one floating-point dtype",
            {"out_b": torch.bfloat16},
        ),
        (TypeError, "b.lse must be torch.float32", {"lse_b": torch.bfloat16}),
        (TypeError, "a.lse must be torch.float32", {"lse_a": torch.float64}),
        (ValueError, "a.out and b.out must have one shape", {"out_b": (2, 5, 3, 4)}),
        (ValueError, r"a.lse must be \(2, 5, 3\), got \(2, 3, 5\)", {"lse_a": (2, 3, 5)}),
        (ValueError, "b.lse is on meta, a.out on", {"lse_b": torch.device("meta")}),
    ],
)
def test_bad_arguments_are_named(error, message, changes):
    inputs, _ = problem()
    for name, change in changes.items():
        if isinstance(change, tuple):
            inputs[name] = torch.ones(change, device=DEVICE)
        else:
            inputs[name] = inputs[name].to(change)
    with pytest.raises(error, match=message):
        merge()(**inputs)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("D", [32, 96, 128, 256])
def test_triton_on_a_gpu_equals_the_reference(D, dtype):
    inputs, dout = problem((2, 1025, 8, D), dtype, "cuda")
    inputs["lse_a"][:, :7] = -math.inf
    inputs["lse_b"][:, 5:9] = -math.inf
    exact = {k: v.float() for k, v in inputs.items()}
    expected = grads(merge("reference"), exact, tuple(d.float() for d in dout))
    got = grads(merge("triton"), inputs, dout)
    if dtype == torch.float32:
        assert_same(got, expected, rtol=1e-5)
    else:
        assert_same(got, expected, rtol=5e-3, low=grads(merge("reference"), inputs, dout))
    again = grads(merge("triton"), inputs, dout)
    assert torch.equal(again[0].out, got[0].out)
    assert all(torch.equal(again[1][name], got[1][name]) for name in got[1])
