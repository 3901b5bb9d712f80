"""A step of narrow layers in one Triton kernel against PyTorch: in the interpreter, or on a GPU."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer.ops.recurrent_layers import eager
from mezzo_recurrent_transformer.ops.recurrent_layers.buffers import BackwardBuffers
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.mlp import mlp_step, mlp_step_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import Matrices

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers import triton as kernels
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import narrow, products

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
RTOL = {FLOAT: 1e-5, BFLOAT: 5e-3, HALF: 5e-3}
NAN = float("nan")
each_dtype = pytest.mark.parametrize(
    "dtype",
    [FLOAT, *(pytest.param(low, marks=pytest.mark.gpu) for low in (BFLOAT, HALF))],
)
# (m, S, B, C, F), the norm, whether it is before the pairs too, and the tokens of a step.
CASES = {
    "the paper's": ((1, 2, 17, 128, 512), "rms", True, 1),
    "ragged": ((3, 4, 5, 48, 100), "layer", True, 1),
    "no norm of pairs": ((2, 3, 2, 32, 16), "rms", False, 1),
    "blocks without a norm": ((2, 6, 9, 8, 24), "none", True, 3),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _every_dtype(monkeypatch):
    monkeypatch.setattr(products, "DTYPES", (FLOAT, BFLOAT, HALF))


def problem(case, dtype):
    """Return the options, weights of one layer more than are used, and a function for tensors."""
    (m, _, _, C, F), norm, persistent_norm, b = case
    form = Form(2, 0.5, norm, 1e-3, persistent_norm, b)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    sizes = {"qkv": (3 * C, C), "o": (C, C), "up": (F, C), "down": (C, F)}
    weights = {name: normal(m + 1, *size) * size[1] ** -0.5 for name, size in sizes.items()}
    norms = dict.fromkeys(("n1", "n2", "q_norm", "k_norm"))
    if norm != "none":  # a part of wider rows, as a caller may have them
        norms = {name: 1 + normal(m + 1, C + 3, dtype=FLOAT)[:, :C] for name in norms}
    return form, Matrices(**weights, **norms).of_layers(1, m + 1), normal


def at(dtype):
    """Return a change of tensors that were low to another dtype."""
    return lambda x: x if x is None or x.dtype == FLOAT else x.to(dtype)


@each_dtype
@cases
def test_a_step_equals_eager(case, dtype):
    (m, S, B, C, _), _, _, b = case
    form, w, normal = problem(case, dtype)
    a, stream, rows = normal(m, b, B, C), normal(m + 1, S, B, C), slice(b, 2 * b)
    stream[:, 2 * b :], stream[:, :b] = NAN, NAN
    assert kernels.is_narrow(a)

    def run(parts, change):
        its = change(stream).clone()  # a layer's outputs are the next one's inputs
        x, z = its[:-1, rows], its[1:, rows]
        pairs = mlp_step(change(a), x, w.map(change), form, z, parts)
        assert its.isnan().sum() == its.numel() * (S - b) // S, "wrote outside of the step"
        return {"z": z, "pairs": pairs}

    check(run, dtype)


READ = ("dpair", "dstream", "z", "h", "u")
WRITTEN = ("dnormed", "dz_scaled", "du", "dhn", "dh", "dh_scaled", "do")


@each_dtype
@cases
def test_a_step_back_equals_eager(case, dtype):
    (_, S, B, C, _), _, _, b = case
    form, w, normal = problem(case, dtype)
    sizes = BackwardBuffers.of(normal(B, S, C), w, S, form)
    read = {name: normal(*getattr(sizes, name).shape, dtype=FLOAT) for name in READ}

    def run(parts, change):
        weights = w.map(change)
        buffers = BackwardBuffers.of(change(normal(B, S, C)), weights, S, form)
        for name in READ:
            getattr(buffers, name).copy_(read[name].to(getattr(sizes, name).dtype))
        for name in WRITTEN:
            getattr(buffers, name).fill_(NAN)
        rest = buffers.u[:, 2 * b :].clone()
        step = buffers.of_step(slice(b, 2 * b))
        mlp_step_bwd(step, weights, form, parts)
        for name in WRITTEN:
            whole = getattr(buffers, name)
            assert whole.isnan().sum() == whole.numel() * (S - b) // S, name
        assert torch.equal(buffers.u[:, 2 * b :], rest)
        return {name: getattr(step, name) for name in ("u", *WRITTEN)}

    check(run, dtype)


def check(run, dtype):
    """Compare the kernels with PyTorch, in float32 and in the dtype."""
    found, low, truth = run(kernels, at(dtype)), run(eager, at(dtype)), run(eager, at(FLOAT))
    for name, wanted in truth.items():
        exact = found[name].dtype == FLOAT == dtype
        rtol = RTOL[dtype]
        assert_close(name, found[name], wanted, rtol=rtol, low=None if exact else low[name])


def test_wide_layers_and_many_rows_are_done_elsewhere():
    x = torch.zeros(1, 1, 4, narrow.CHANNELS)
    assert kernels.is_narrow(x)
    assert not kernels.is_narrow(torch.zeros(1, 1, 4, narrow.CHANNELS + 1))
    assert not kernels.is_narrow(x.expand(products.PROGRAMS + 1, -1, -1, -1))
    assert not eager.is_narrow(x)


def test_a_nan_stays_in_its_row():
    case = CASES["the paper's"]
    form, w, normal = problem(case, FLOAT)
    (m, _, B, C, _), *_ = case
    a, x, z = normal(m, 1, B, C), normal(m, 1, B, C), torch.zeros(m, 1, B, C, device=DEVICE)
    healthy = kernels.narrow_mlp_step(a, x, w, form, z)
    a[0, 0, 3, 0] = NAN
    found = kernels.narrow_mlp_step(a, x, w, form, z)
    assert found[0, 0, 3].isnan().all()
    others = torch.arange(B, device=DEVICE) != 3
    assert torch.equal(found[:, :, others], healthy[:, :, others])
