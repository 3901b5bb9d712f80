"""The norm with a gate: its definition, and the kernels beside it.

The interpreter multiplies bfloat16 wrongly, so that dtype is tested on a GPU only.
"""

from functools import partial

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_gsa.ops import gated_norm
from mezzo_gsa.ops.norms import triton
from mezzo_gsa.ops.norms.op import gated_norm_bwd, gated_norm_op
from torch.nn import functional as F

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = {torch.float16: 5e-3, torch.bfloat16: 2e-2, torch.float32: 1e-5}
gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu)]
SHAPES = [(2, 5, 3, 20), (1, 7, 1, 96), (1, 1, 2, 3), pytest.param((8, 2048, 4, 512), marks=gpu)]


def draw(shape, dtype, *, gated):
    """Draw o (B, T, H, D), the weight and z, which is a part of a wider projection."""
    B, T, H, D = shape
    draws = torch.Generator().manual_seed(0)
    o, weight = torch.randn(shape, generator=draws), torch.randn(D, generator=draws)
    wide = torch.randn(B, T, H * D + 3, generator=draws).to(DEVICE, dtype)
    z = wide[..., 3:].unflatten(2, (H, D)) if gated else None
    return o.to(DEVICE, dtype), weight.to(DEVICE, dtype), z


def outputs_and_gradients(inputs, impl, dout):
    inputs = [None if x is None else x.detach().requires_grad_() for x in inputs]
    y = gated_norm(*inputs[:2], 1e-5, z=inputs[2], impl=impl)
    return [y, *torch.autograd.grad(y, [x for x in inputs if x is not None], dout.to(y.dtype))]


@pytest.mark.parametrize("gated", [False, True])
def test_it_is_the_definition(gated):
    o, weight, z = draw((2, 5, 3, 20), torch.float64, gated=gated)
    u = o if gated else o * o.sigmoid()
    expected = weight * u / (u.square().mean(-1, keepdim=True) + 1e-3).sqrt()
    if gated:
        expected = expected * F.silu(z)
    assert_close("y", gated_norm(o, weight, 1e-3, z=z), expected, rtol=1e-12)
    assert_close("swish alone", gated_norm(o, None, 1e-3), F.silu(o), rtol=1e-12)
    assert gated_norm(o, weight, 1e-3, torch.float32, z=z).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_equal_the_reference(shape, gated, dtype, monkeypatch):
    if DEVICE == "cpu":
        monkeypatch.setattr(triton, "NUMBERS", 64)
        monkeypatch.setattr(triton, "FULL", 2)  # so that a program has rows in turn
    inputs = draw(shape, dtype, gated=gated)
    dout = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE, dtype)
    truth = outputs_and_gradients(
        [None if x is None else x.double() for x in inputs], "reference", dout.double()
    )
    found = outputs_and_gradients(inputs, "triton", dout)
    for name, x, true in zip(("y", "do", "dweight", "dz"), found, truth, strict=False):
        assert x.dtype == dtype
        assert_close(name, x, true, rtol=LOW[dtype])
    for x, again in zip(found, outputs_and_gradients(inputs, "triton", dout), strict=True):
        assert torch.equal(x, again), "repeats to the bit"


@pytest.mark.parametrize("gated", [False, True])
def test_what_is_not_a_number_stays_in_its_row(gated):
    o, weight, z = draw((2, 5, 3, 20), torch.float32, gated=gated)
    o[1, 2, 1, 4] = float("nan")
    y, do, *_ = outputs_and_gradients((o, weight, z), "triton", torch.ones_like(o))
    for x in (y, do):
        bad = x.isnan().flatten(2)
        assert bad[1, 2].any()
        assert not bad.flatten(0, 1)[[0, 1, 2, 3, 4, 5, 6, 8, 9]].any()


@pytest.mark.parametrize("value", [0.0, -100.0, 100.0, 1e4])
@pytest.mark.parametrize("gated", [False, True])
def test_extreme_numbers_keep_their_digits(gated, value):
    o, weight, z = draw((1, 2, 1, 20), torch.float32, gated=gated)
    (z if gated else o).data[0, 0] = value
    inputs, dout = (o, weight, z), torch.ones_like(o)
    truth = outputs_and_gradients(
        [None if x is None else x.double() for x in inputs], "reference", dout.double()
    )
    for x, true in zip(outputs_and_gradients(inputs, "triton", dout), truth, strict=True):
        assert_close("result", x, true, rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_registered_ops_are_sound(gated):
    o, weight, z = draw((2, 3, 2, 16), torch.float32, gated=gated)
    o, z = o.view(-1, 16), z if z is None else z.flatten(0, 1)
    wanted = [x.clone().requires_grad_() for x in (o, weight)]
    torch.library.opcheck(gated_norm_op, (*wanted, z, 1e-5, torch.float32))
    torch.library.opcheck(gated_norm_bwd, (o, o, weight, z, 1e-5))
    turned = o.t().contiguous().t()
    torch.library.opcheck(gated_norm_bwd, (turned, turned, weight, z, 1e-5))


def test_a_pullback_of_torch_func_is_the_gradient():
    o, weight, z = draw((2, 5, 3, 20), torch.float32, gated=True)
    found = []
    for impl in ("triton", "reference"):
        run = partial(gated_norm, o, weight, 1e-5, impl=impl)
        y, pull = torch.func.vjp(lambda z, run=run: run(z=z), z)
        found.append(pull(torch.ones_like(y))[0])
    assert_close("dz", *found, rtol=1e-5)


@pytest.mark.any_shapes
def test_a_compiled_call_is_one_graph_of_the_reference():
    o, weight, z = draw((2, 3, 2, 16), torch.float32, gated=True)
    for impl in ("auto", "triton"):
        run = torch.compile(gated_norm, fullgraph=True, backend="aot_eager")
        expected = gated_norm(o, weight, 1e-5, z=z, impl="reference")
        assert_close(impl, run(o, weight, 1e-5, z=z, impl=impl), expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"o": torch.ones(2, 4).int()}, TypeError, "o must be floating-point"),
        ({"weight": torch.ones(3)}, ValueError, r"weight must be \(4,\), got \(3,\)"),
        ({"z": torch.ones(4)}, ValueError, r"z must be \(2, 4\), got \(4,\)"),
        ({"eps": 0.0}, ValueError, "eps must be positive"),
        ({"impl": "fast"}, ValueError, "impl must be one of"),
        ({"weight": None, "z": torch.ones(2, 4)}, ValueError, "z goes with a weight"),
        ({"weight": None, "impl": "triton"}, ValueError, "does not support no weight"),
        ({"o": torch.ones(2, 4).double(), "impl": "triton"}, ValueError, "support torch.float64"),
        ({"weight": torch.ones(4).double(), "impl": "triton"}, ValueError, "support torch.float64"),
        (
            {"o": torch.ones(1, 8193), "weight": torch.ones(8193), "impl": "triton"},
            ValueError,
            "does not support rows of 8193",
        ),
        ({"o": torch.ones(0, 4), "impl": "triton"}, ValueError, "does not support empty tensors"),
    ],
)
@pytest.mark.any_shapes
def test_input_that_does_not_fit_is_named(change, error, message):
    given = {"o": torch.ones(2, 4), "weight": torch.ones(4), "eps": 1e-5, **change}
    with pytest.raises(error, match=f"gated_norm: .*{message}"):
        gated_norm(**given)


def test_gates_of_turned_heads_and_of_a_single_row_are_read_as_they_lie():
    (o, z), weight = torch.randn(2, 3, 4, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    for o_, z_ in ((o, z.transpose(0, 1).contiguous().transpose(0, 1)), (o[0, 0], z[0, 0])):
        y, ref = (gated_norm(o_, weight, 1e-5, z=z_, impl=x) for x in ("triton", "reference"))
        assert_close("y", y, ref, rtol=1e-5)


def test_weights_and_channels_of_gates_may_lie_apart():
    o, dout, wide = torch.randn(3, 3, 1, 16, device=DEVICE)
    o, dout, z, weight = o[..., :8], dout[..., :8], wide[..., ::2], wide[0, 0, 1::2]
    found, truth = (
        outputs_and_gradients((o, weight, z), impl, dout) for impl in ("triton", "reference")
    )
    for x, true in zip(found, truth, strict=True):
        assert_close("result", x, true, rtol=1e-5)


@pytest.mark.parametrize("gated", [False, True])
def test_half_precision_is_rounded_at_the_end_alone(gated):
    low = draw((2, 5, 3, 20), torch.float16, gated=gated)
    wide = [None if x is None else x.float() for x in low]
    y, expected = (gated_norm(o, w, 1e-5, z=z, impl="reference") for o, w, z in (low, wide))
    assert torch.equal(y, expected.half())
