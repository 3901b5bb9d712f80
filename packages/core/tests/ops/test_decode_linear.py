import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.ops.decode_linear import decode_linear
from mezzo_core.testing import assert_close

from .impls import DEVICE, NO_TRITON, impls

LOW = [torch.float16, torch.bfloat16]
some = settings(max_examples=settings().max_examples // 5)


def problem(R, N, K, *, bias=False, norm=False, dtype=torch.float32, x_dtype=None, seed=0):
    """Random inputs by name; outputs are near 1."""
    draw = torch.Generator().manual_seed(seed)
    inputs = {
        "x": torch.randn(R, K, generator=draw).to(DEVICE, x_dtype or dtype),
        "weight": (torch.randn(N, K, generator=draw) / K**0.5).to(DEVICE, dtype),
    }
    if bias:
        inputs["bias"] = torch.randn(N, generator=draw).to(DEVICE, dtype)
    if norm:
        inputs["norm_weight"] = torch.randn(K, generator=draw).to(DEVICE, dtype)
    return inputs


def upcast(inputs, dtype=torch.float32):
    return {name: part.to(dtype) for name, part in inputs.items()}


@impls
def test_it_is_the_norm_and_the_layer_that_torch_has(impl):
    inputs = problem(1, 20, 24, bias=True, norm=True)
    norm, layer = torch.nn.RMSNorm(24, eps=1e-3), torch.nn.Linear(24, 20)
    norm.weight.data = inputs["norm_weight"].double()
    layer.weight.data, layer.bias.data = inputs["weight"].double(), inputs["bias"].double()
    with torch.no_grad():
        expected = layer(norm(inputs["x"].double()))
        assert_close("y", decode_linear(**inputs, norm_eps=1e-3, impl=impl), expected, rtol=1e-6)


@some
@given(st.data())
def test_triton_equals_the_reference(data):
    pytest.importorskip("triton")
    N = data.draw(st.integers(1, 70))
    K = data.draw(st.integers(1, 600) | st.sampled_from([1024, 2049, 5504]))
    bias, norm = data.draw(st.booleans()), data.draw(st.booleans())
    inputs = problem(1, N, K, bias=bias, norm=norm, seed=data.draw(st.integers(0, 99)))
    expected = decode_linear(**inputs, impl="reference")
    y, atol = decode_linear(**inputs, impl="triton"), 1e-6 if N < 4 else 0.0  # all may be near zero
    assert_close("y", y, expected, rtol=1e-5, atol=atol)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("x_dtype", [None, torch.float32], ids=["", "float32 rows"])
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_triton_in_low_precision_is_as_exact_as_the_reference(norm, x_dtype, dtype):
    pytest.importorskip("triton")
    inputs = problem(1, 130, 700, bias=True, norm=norm, dtype=dtype, x_dtype=x_dtype)
    low = decode_linear(**inputs, impl="reference")
    ref = decode_linear(**upcast(inputs), impl="reference")
    y = decode_linear(**inputs, impl="triton")
    assert y.dtype == low.dtype == dtype
    assert_close("y", y, ref, rtol=5e-3, low=low)


@impls
def test_strides_and_axes_do_not_matter(impl):
    inputs = problem(1, 20, 48, bias=True, norm=True)
    expected = decode_linear(**inputs, impl=impl)
    x, weight = inputs["x"], inputs["weight"]
    forms = {
        "a part of a wider row": {"x": torch.cat([x, x + 1], 1)[:, :48]},
        "each second number": {"x": x.repeat_interleave(2, 1)[:, ::2]},
        "a part of a wider weight": {"weight": torch.cat([weight, weight + 1], 1)[:, :48]},
        "vectors of each second number": {
            name: inputs[name].repeat_interleave(2)[::2] for name in ("bias", "norm_weight")
        },
    }
    for name, form in forms.items():
        y = decode_linear(**{**inputs, **form}, impl=impl)
        assert_close(name, y, expected, rtol=1e-6)
    y = decode_linear(**{**inputs, "x": x.view(1, 1, 48)}, impl=impl)
    assert_close("two axes of rows", y, expected.view(1, 1, 20), rtol=1e-6)
    y = decode_linear(**{**inputs, "x": x[0]}, impl=impl)
    assert_close("none", y, expected[0], rtol=1e-6)


@impls
def test_a_weight_of_one_column_may_have_any_stride(impl):
    inputs = problem(1, 20, 1)
    turned = inputs["weight"].view(1, 20).T
    assert turned.stride(1) != 1
    y = decode_linear(**{**inputs, "weight": turned}, impl=impl)
    assert torch.equal(y, decode_linear(**inputs, impl=impl))


@impls
def test_x_is_rounded_to_the_dtype_of_the_weight(impl):
    x = torch.tensor([[1 + 2**-9, 1.0]], device=DEVICE)
    weight = torch.tensor([[256.0, -256.0]], dtype=torch.bfloat16, device=DEVICE)
    assert decode_linear(x, weight, impl=impl).item() == 0


def test_more_rows_are_the_library_s():
    inputs = problem(3, 20, 24, bias=True, norm=True)
    rows = [decode_linear(**{**inputs, "x": x}) for x in inputs["x"]]
    assert_close("y", decode_linear(**inputs), torch.stack(rows), rtol=1e-6)


@impls
def test_nothing_gives_nothing(impl):
    assert decode_linear(**problem(1, 0, 16), impl=impl).shape == (1, 0)
    assert decode_linear(**problem(0, 5, 16)).shape == (0, 5)


@pytest.mark.slow
def test_the_kernel_compiles_for_hopper_and_once_for_all_heights():
    pytest.importorskip("triton")
    environment = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).parent / "children" / "compile_decode_linear.py"
    command = [sys.executable, str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@NO_TRITON
def test_opcheck():
    inputs = problem(1, 20, 24, bias=True, norm=True)
    for x in (inputs["x"], inputs["x"][:, None]):
        arguments = (x, *list(inputs.values())[1:], 1e-6)
        torch.library.opcheck(torch.ops.mezzo.decode_linear.default, arguments)
    arguments = (inputs["x"].half(), inputs["weight"], None, None, 1e-6)
    torch.library.opcheck(torch.ops.mezzo.decode_linear.default, arguments)


@impls
@pytest.mark.any_shapes
def test_compiles_to_one_graph(impl):
    inputs = problem(1, 20, 24, bias=True, norm=True)

    def apply(**inputs):
        return decode_linear(**inputs, impl=impl)

    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(apply, fullgraph=True, backend=backend)
    assert_close("y", compiled(**inputs), apply(**inputs), rtol=1e-6)


def test_gradients_are_the_reference_s():
    inputs = upcast(problem(2, 3, 5, bias=True, norm=True), torch.float64)
    tensors = [part.requires_grad_() for part in inputs.values()]
    names = list(inputs)

    def apply(*tensors):
        return decode_linear(**dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradcheck(apply, tensors)


@pytest.mark.parametrize("name", ["x", "weight", "bias", "norm_weight"])
def test_gradients_are_refused_by_the_kernel(name):
    pytest.importorskip("triton")
    inputs = problem(1, 20, 24, bias=True, norm=True)
    inputs[name].requires_grad_()
    assert decode_linear(**inputs).requires_grad
    with pytest.raises(ValueError, match="does not support gradients"):
        decode_linear(**inputs, impl="triton")
    with torch.no_grad():
        decode_linear(**inputs, impl="triton")


@pytest.mark.parametrize(
    ("message", "change"),
    [
        ("float64", lambda i: upcast(i, torch.float64)),
        ("6 rows", lambda i: {"x": i["x"].new_zeros(2, 3, 24)}),
        ("0 rows", lambda i: {"x": i["x"].new_zeros(0, 24)}),
        ("K = 16385", lambda i: {"x": torch.zeros(1, 16_385), "weight": torch.zeros(2, 16_385)}),
        ("K = 0", lambda i: {"x": torch.zeros(1, 0), "weight": torch.zeros(2, 0)}),
        ("rows are not contiguous", lambda i: {"weight": i["weight"].T.contiguous().T}),
    ],
)
def test_what_triton_cannot_do_is_refused_when_asked_for_by_name(message, change):
    pytest.importorskip("triton")
    inputs = problem(1, 20, 24)
    inputs = {name: part.to(DEVICE) for name, part in {**inputs, **change(inputs)}.items()}
    with pytest.raises(ValueError, match=f"does not support .*{message}"):
        decode_linear(**inputs, impl="triton")
    assert torch.equal(decode_linear(**inputs), decode_linear(**inputs, impl="reference"))


def test_a_bias_of_another_dtype_is_refused():
    """The other bad arguments are in tests/test_arguments.py."""
    inputs = problem(2, 20, 24, bias=True)
    with pytest.raises(TypeError, match="weight and bias must have one floating dtype"):
        decode_linear(**inputs | {"bias": inputs["bias"].double()})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("N", "K"), [(6400, 2048), (2048, 2048), (50_000, 2048), (2048, 16_384), (2560, 5504)]
)
@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
def test_triton_on_a_gpu_equals_the_reference(norm, N, K, dtype):
    inputs = problem(1, N, K, bias=True, norm=norm, dtype=dtype)
    y = decode_linear(**inputs)
    ref = decode_linear(**upcast(inputs), impl="reference")
    if dtype == torch.float32:
        assert_close("y", y, ref, rtol=1e-5)
    else:
        low = decode_linear(**inputs, impl="reference")
        assert_close("y", y, ref, rtol=5e-3, low=low)
    assert torch.equal(decode_linear(**inputs), y), "repeats"


@pytest.mark.gpu
def test_autocast_is_followed():
    inputs = problem(1, 20, 24, norm=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert decode_linear(**inputs).dtype == torch.bfloat16
        with pytest.raises(ValueError, match="does not support autocast"):
            decode_linear(**inputs, impl="triton")
