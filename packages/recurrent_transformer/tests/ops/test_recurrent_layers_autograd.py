"""`recurrent_layers` under autograd, torch.compile and torch.func; what the backward keeps."""

from functools import partial

import pytest
import torch
from mezzo_core.testing import assert_close, grads
from mezzo_recurrent_transformer.ops.recurrent_layers import (
    LayerWeights,
    eager,
    op,
    recurrent_layers,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.backward import Kept, backward
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import forward
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from . import problems
from .problems import layers

H, C = 2, 8
# Name: (B, T, arguments). A tile has 16 tokens.
CASES = {
    "one tile": (2, 5, {}),
    "two tiles": (2, 18, {}),
    "packed": (1, 18, {"packed": (1, 0, 17)}),
    "past": (2, 18, {"seen": (3, 0)}),
    "padded": (2, 18, {"seen": (3, 0), "real": (7, 18)}),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
problem = partial(problems.problem, dtype=torch.float32)


def loss(outputs):
    return sum(out.square().sum() for out in outputs)


def gradients(call, inputs):
    """The loss and its gradients by name."""
    value, found = grads(lambda **tensors: loss(call(**tensors)), inputs, torch.ones(()))
    return {"loss": value} | found


def assert_same(found, wanted, rtol):
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert_close(name, value, wanted[name], rtol=rtol, atol=1e-7)


@pytest.mark.parametrize(
    ("name", "norm"), [("one tile", "none"), ("two tiles", "rms"), ("past", "rms")]
)
def test_gradcheck(name, norm):
    inputs, options, _ = problem(CASES[name], norm=norm, dtype=torch.float64)
    leaves = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(
        lambda *values: layers(**options)(**dict(zip(inputs, values, strict=True))),
        leaves,
        fast_mode=True,
    )


def registered(inputs, options, dtype=torch.float32):
    """The arguments of the registered op, with products in a dtype."""
    weights = LayerWeights(**{k: v for k, v in inputs.items() if k not in ("x", "k", "v")})
    return (
        inputs["x"],
        *Matrices.of(weights, dtype),
        options["alibi_slopes"],
        *(inputs.get("k"), inputs.get("v"), options.get("seen"), options.get("cu_seqlens")),
        *(H, 0.7, options["norm"], options["eps"], True, 1, "eager"),
    )


@pytest.mark.parametrize(("name", "n"), [("two tiles", 1), ("past", 1), ("packed", 3), ("past", 3)])
def test_opcheck(name, n):
    inputs, options, (dz, *_) = problem(CASES[name], n)
    ops = torch.ops.mezzo_recurrent_transformer
    arguments = registered(inputs, options)
    z, stream, *pairs = ops.recurrent_layers(*arguments)
    tracked = [
        a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
        for a in arguments
    ]
    slopes = options["alibi_slopes"]  # which have no gradient
    tracked = [slopes if a is slopes else t for a, t in zip(arguments, tracked, strict=True)]
    torch.library.opcheck(ops.recurrent_layers.default, tuple(tracked))
    kept = (inputs["x"], z) if n == 1 else (stream, None)
    for pulled in [(None, None), pairs] if "seen" in options else [(None, None)]:
        its = (dz, *pulled, *kept, *arguments[1:])
        # AOTAutograd traces it with the forward.
        fakes = ("test_schema", "test_autograd_registration", "test_faketensor")
        torch.library.opcheck(ops.recurrent_layers_bwd.default, its, test_utils=fakes)


@pytest.mark.parametrize("name", ["two tiles", "past"])
def test_fakes_know_the_dtypes_of_products_in_another_than_the_stream(name):
    inputs, options, (dz, *_) = problem(CASES[name], 1)
    ops, arguments = torch.ops.mezzo_recurrent_transformer, registered(inputs, options, torch.half)
    z, *_ = ops.recurrent_layers(*arguments)
    its = (dz, None, None, inputs["x"], z, *arguments[1:])
    for each, given in ((ops.recurrent_layers, arguments), (ops.recurrent_layers_bwd, its)):
        torch.library.opcheck(each.default, given, test_utils="test_faketensor")


@pytest.mark.parametrize("borders", [None, torch.tensor([0, 1, 2])])
def test_gradients_of_weights_in_16_bits_are_summed_in_float32(borders):
    inputs, options, (dz,) = problem((1, 2, {}), 1)
    x = inputs.pop("x").bfloat16()
    weights = LayerWeights(**{name: w.bfloat16() for name, w in inputs.items()})
    matrices, form = Matrices.of(weights, torch.bfloat16), Form(H, 0.7, "rms", 1e-5, True, 1)
    call = Call(matrices, options["alibi_slopes"], None, form, eager)
    found = op._run_bwd(dz.bfloat16(), None, None, Kept(x, x), call, borders)
    assert {w.dtype for w in found.weights} == {torch.float32}


@pytest.mark.parametrize("name", ["two tiles", "packed", "past", "padded"])
@pytest.mark.any_shapes
def test_compiles_to_one_graph_and_serves_a_second_length(name):
    torch._dynamo.reset()
    inputs, options, _ = problem(CASES[name])
    call = layers(**options)
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same(gradients(compiled, inputs), gradients(call, inputs), 1e-6)
    if name in ("two tiles", "past"):
        inputs["x"] = torch.cat([inputs["x"], inputs["x"]], 1)
        assert_same(gradients(compiled, inputs), gradients(call, inputs), 1e-6)


@pytest.mark.any_shapes
def test_the_reference_compiles_to_one_graph():
    torch._dynamo.reset()
    inputs, options, _ = problem(CASES["past"])
    inputs["x"] = inputs["x"][:, :2]
    call = layers(impl="reference", **options)
    compiled = torch.compile(call, fullgraph=True, backend="eager")
    for found, wanted in zip(compiled(**inputs), call(**inputs), strict=True):
        assert_close("reference", found, wanted, rtol=1e-6)


@cases
def test_torch_func_gives_the_same_gradients(case):
    inputs, options, _ = problem(case)
    call = layers(**options)
    found = torch.func.grad(lambda tensors: loss(call(**tensors)))(inputs)
    wanted = gradients(call, inputs)
    for name, value in found.items():
        assert_close(name, value, wanted[name], rtol=1e-6)


def test_gradients_of_each_row_may_be_taken_by_vmap():
    inputs, options, _ = problem(CASES["one tile"])
    x, call = inputs.pop("x"), layers(**options)
    slopes = torch.func.grad(lambda weights, row: loss(call(row[None], **weights)))
    found = torch.vmap(slopes, (None, 0))(inputs, x)
    for i, row in enumerate(x):
        for name, value in slopes(inputs, row).items():
            assert_close(name, found[name][i], value, rtol=1e-6)


def test_a_second_gradient_is_refused_rather_than_zero():
    inputs, options, _ = problem(CASES["one tile"])
    call = layers(**options)

    def slope(x):
        return torch.func.grad(lambda w: loss(call(**inputs | {"wv": w, "x": x})))(
            inputs["wv"]
        ).sum()

    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.func.grad(slope)(inputs["x"])
    x = inputs["x"].clone().requires_grad_()
    z, *_ = call(**inputs | {"x": x})
    with pytest.raises(RuntimeError):
        torch.autograd.grad(torch.autograd.grad(z.sum(), x, create_graph=True)[0].sum(), x)


@pytest.mark.parametrize("name", ["two tiles", "past"])
def test_no_gradients_give_the_same_results(name):
    inputs, options, _ = problem(CASES[name])
    tracked = layers(**options)(**{k: v.clone().requires_grad_() for k, v in inputs.items()})
    with torch.no_grad():
        untracked = layers(**options)(**inputs)
    for one, other in zip(tracked, untracked, strict=True):
        assert one.requires_grad
        assert not other.requires_grad
        assert torch.equal(one, other)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("name", ["two tiles", "packed"])
def test_only_the_inputs_and_the_outputs_of_the_layers_are_kept(name, n):
    inputs, options, _ = problem(CASES[name], n)
    leaves = {k: v.requires_grad_() for k, v in inputs.items()}
    kept = {}

    def pack(tensor):
        kept[tensor.data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        z, _ = recurrent_layers(leaves.pop("x"), LayerWeights(**leaves), impl="eager", **options)
    # Weights have no axis of T tokens.
    activations = sum(t.numel() for t in kept.values() if z.shape[1] in t.shape)
    assert activations == (n + 1) * z.numel()
    weights = sum(w.numel() for w in leaves.values()) + H  # and the slopes
    if "cu_seqlens" in options:
        weights += options["cu_seqlens"].numel()
    assert sum(t.numel() for t in kept.values()) == activations + weights


class Made(TorchDispatchMode):
    """Keeps the tensors of a shape that are made, by their memory."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.memory = shape, {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor) and t.shape == self.shape:
                self.memory.setdefault(t.untyped_storage().data_ptr(), t)
        return found


def test_the_backward_makes_two_tensors_of_all_layers_and_tokens():
    n, B, T = 3, 2, 32
    inputs, options, (dz, *_) = problem((B, T, {}), n)
    weights = LayerWeights(**{name: w for name, w in inputs.items() if name != "x"})
    matrices, form = Matrices.of(weights, torch.float32), Form(H, 0.7, "rms", 1e-5, True, 1)
    call = Call(matrices, options["alibi_slopes"], None, form, eager)
    stream = forward(inputs["x"], call).stream
    with Made((n, B, T, C)) as made:
        backward(dz, None, Kept(stream, None), call)
    # Keys and values; the layers' inputs and outputs are views of the stream.
    assert len(made.memory.keys() - {stream.untyped_storage().data_ptr()}) == 2


def test_frozen_weights_get_no_gradient():
    inputs, options, _ = problem(CASES["past"])
    wanted = gradients(layers(**options), inputs)
    leaves = {k: v.clone().requires_grad_(k in ("wk", "v")) for k, v in inputs.items()}
    loss(layers(**options)(**leaves)).backward()
    for name, leaf in leaves.items():
        if name in ("wk", "v"):
            assert_close(name, leaf.grad, wanted[name], rtol=1e-6)
        else:
            assert leaf.grad is None
