import math

import pytest
import torch
from mezzo_core.testing import assert_close, grads


def test_rounding_passes_and_a_wrong_number_fails():
    ref = torch.randn(1000)
    assert_close("out", ref * (1 + 1e-6), ref, rtol=1e-5)
    with pytest.raises(AssertionError, match=r"out: \|\|out - ref\|\| ="):
        assert_close("out", ref * (1 + 1e-4), ref, rtol=1e-5)


def test_one_bad_element_among_many_fails_by_the_second_bound():
    ref = torch.randn(100_000)
    ref[7] = 0  # bfloat16 has this one exactly
    low = ref.bfloat16()
    out = low.clone()
    assert_close("out", out, ref, low=low, rtol=5e-3)
    out[7] += 0.5
    assert_close("out", out, ref, rtol=5e-3)
    with pytest.raises(AssertionError, match=r"max\|out - ref\| = 5.* lie in \[7:8\] of"):
        assert_close("out", out, ref, low=low, rtol=5e-3)


def test_the_factor_widens_the_second_bound():
    ref = torch.zeros(10)
    low, out = torch.full((10,), 1.0), torch.full((10,), 2.5)
    assert_close("out", out, ref, low=low, rtol=0, atol=3, factor=3)
    with pytest.raises(AssertionError, match=r"max\|out - ref\|"):
        assert_close("out", out, ref, low=low, rtol=0, atol=3)


@pytest.mark.parametrize(
    ("out", "ref"),
    [
        (1.0, 2.0),
        ([1.0, math.nan], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.nan]),
        ([1.0, math.nan], [1.0, math.nan]),
        ([1.0, math.inf], [1.0, 2.0]),
        ([1.0, 2.0], [1.0, math.inf]),
        ([1.0, math.inf], [1.0, -math.inf]),
        ([[1.0, 2.0]], [1.0, 2.0]),
        ([1.0, 1e-30], [1.0, 1e-3]),
        ([1e-9, 0.0], [0.0, 0.0]),
    ],
)
def test_what_is_not_the_same_fails(out, ref):
    with pytest.raises(AssertionError, match=r"^y: "):
        assert_close("y", torch.tensor(out), torch.tensor(ref), rtol=1e-5)


def test_infinities_in_the_same_places_and_empty_tensors_pass():
    lse = torch.tensor([1.0, -math.inf])
    assert_close("lse", lse, lse, rtol=1e-5)
    assert_close("lse", lse[:0], lse[:0], low=lse[:0], rtol=1e-5)
    assert_close("noise", torch.tensor([1e-8]), torch.zeros(1), rtol=1e-5, atol=1e-7)


def test_grads_are_those_of_autograd_and_leave_the_inputs_alone():
    inputs = {"x": torch.randn(4, 3).t(), "y": torch.randn(3, 4), "unused": torch.randn(2)}
    inputs |= {"index": torch.tensor([0, 2]), "nothing": None}

    def fn(x, y, unused, index, nothing):
        assert x.stride() == inputs["x"].stride()
        return (x * y)[index], None, x.sum()

    dout = torch.randn(2, 4)
    outputs, found = grads(fn, inputs, (dout, None, torch.tensor(2.0)))
    spread = torch.zeros(3, 4).index_copy(0, inputs["index"], dout)
    assert torch.equal(outputs[0], (inputs["x"] * inputs["y"])[inputs["index"]])
    assert list(found) == ["x", "y", "unused"]
    torch.testing.assert_close(found["x"], spread * inputs["y"] + 2)
    torch.testing.assert_close(found["y"], spread * inputs["x"])
    assert torch.equal(found["unused"], torch.zeros(2))
    assert not inputs["x"].requires_grad


def test_grads_expose_a_wrong_backward():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return 2 * x

        @staticmethod
        def backward(ctx, dout):
            return dout

    x, dout = torch.randn(5), torch.randn(5)
    _, right = grads(lambda x: 2 * x, {"x": x}, dout)
    _, wrong = grads(lambda x: Wrong.apply(x), {"x": x}, dout)
    with pytest.raises(AssertionError, match=r"^dx"):
        assert_close("dx", wrong["x"], right["x"], rtol=1e-5)
