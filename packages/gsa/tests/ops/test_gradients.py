"""The gradients that torch.func finds through the public ops are those of autograd."""

import pytest
import torch
from mezzo_core.testing import assert_close, grads
from mezzo_gsa.ops import (
    GSAState,
    chunk_gla,
    chunk_gsa,
    chunk_gsa_projected,
    recurrent_gla,
    recurrent_gsa,
)
from torch.utils.checkpoint import checkpoint

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HEADS = {"num_heads": 2, "num_kv_heads": 1, "num_slots": 4}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)


def qkv():
    return {"q": normal(1, 6, 2, 5), "k": normal(1, 6, 1, 5), "v": normal(1, 6, 1, 3)}


def gsa(op, *, impl, **options):
    """Return a form of GSA as a function of tensors only, and such tensors."""
    gates = {"g": -normal(1, 6, 1, 4).abs(), "s": normal(1, 6, 1, 4)}
    memories = {"k0": normal(1, 1, 4, 5), "v0": normal(1, 1, 4, 3)}
    options |= {} if impl is None else {"impl": impl}

    def run(k0, v0, **inputs):
        out, last = op(**inputs, initial_state=GSAState(k0, v0), **options)
        return out, *last

    return run, {**qkv(), **gates, **memories}


def gla(op, *, impl):
    """Return a form of GLA as a function of tensors only, and such tensors."""
    options = {} if impl is None else {"impl": impl}
    inputs = {"g": -normal(1, 6, 1, 5).abs(), "initial_state": normal(1, 1, 5, 3)}
    return lambda **inputs: tuple(op(**inputs, **options)), {**qkv(), **inputs}


def projected(*, impl, **options):
    """Return GSA as a function of a projection only, and a projection."""

    def run(x):
        out, last = chunk_gsa_projected(x, **HEADS, impl=impl, **options)
        return out, *last

    return run, {"x": normal(1, 6, 4 * 5 + 4)}


PROBLEMS = {
    "chunk_gsa triton": lambda: gsa(chunk_gsa, impl="triton"),
    "chunk_gsa triton, states kept": lambda: gsa(chunk_gsa, impl="triton", keep_states=True),
    "chunk_gsa reference": lambda: gsa(chunk_gsa, impl="reference"),
    "recurrent_gsa": lambda: gsa(recurrent_gsa, impl=None),
    "chunk_gsa_projected triton": lambda: projected(impl="triton"),
    "chunk_gsa_projected triton, states kept": lambda: projected(impl="triton", keep_states=True),
    "chunk_gsa_projected reference": lambda: projected(impl="reference"),
    "chunk_gla triton": lambda: gla(chunk_gla, impl="triton"),
    "chunk_gla reference": lambda: gla(chunk_gla, impl="reference"),
    "recurrent_gla": lambda: gla(recurrent_gla, impl=None),
}


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_the_gradient_of_torch_func_is_that_of_autograd(problem):
    run, inputs = problem()
    weights = [torch.randn_like(result) for result in run(**inputs)]
    _, expected = grads(run, inputs, tuple(weights))

    def loss(inputs):
        return sum((y * w).sum() for y, w in zip(run(**inputs), weights, strict=True))

    found = torch.func.grad(loss)(inputs)
    for name, gradient in found.items():
        assert_close(f"d{name}", gradient, expected[name], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name in PROBLEMS if "triton" in name])
def test_a_second_gradient_by_kernels_is_refused_rather_than_zero(name):
    run, inputs = PROBLEMS[name]()

    def slope(inputs):
        slopes = torch.func.grad(lambda inputs: run(**inputs)[0].square().sum())(inputs)
        return sum(dx.sum() for dx in slopes.values())

    with pytest.raises(RuntimeError, match="no second gradient"):
        torch.func.grad(slope)(inputs)


@pytest.mark.parametrize("name", PROBLEMS)
def test_activations_computed_again_give_the_same_gradients(name):
    run, inputs = PROBLEMS[name]()

    def again(**tensors):
        return checkpoint(run, use_reentrant=False, **tensors)

    found, wanted = (
        torch.autograd.grad(sum(x.sum() for x in call(**leaves)), [*leaves.values()])
        for call in (again, run)
        for leaves in [{key: x.clone().requires_grad_() for key, x in inputs.items()}]
    )
    assert all(map(torch.equal, found, wanted))
