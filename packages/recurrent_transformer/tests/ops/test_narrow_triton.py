"""Leaves of narrow layers, each in one kernel, against PyTorch: in the interpreter, or on a GPU."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer.ops.recurrent_layers import eager, tiles
from mezzo_recurrent_transformer.ops.recurrent_layers.backward import run_tile_bwd
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import run_tile
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    BackwardBuffers,
    ForwardBuffers,
    Matrices,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Workspace

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers import triton as kernels
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import narrow, products

from .comparison import BFLOAT, DEVICE, FLOAT, HALF, NAN, RTOL, each_dtype

# (m, S, B, H, C, F), the norm, and whether it is before the pairs too.
CASES = {
    "the paper's": ((1, 3, 17, 16, 128, 512), "rms", True),
    "ragged": ((3, 5, 2, 3, 48, 100), "layer", True),
    "two leaves, no norm of pairs": ((2, 16, 2, 1, 32, 16), "rms", False),
    "no norm": ((2, 7, 3, 2, 8, 24), "none", True),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(autouse=True)
def _every_dtype_and_short_leaves(monkeypatch):
    monkeypatch.setattr(tiles, "LEAF", 8)
    monkeypatch.setattr(products, "DTYPES", (FLOAT, BFLOAT, HALF))


def problem(case, dtype):
    """Return the options, weights of one layer more than are used, slopes, and random tensors."""
    (m, _, _, H, C, F), norm, persistent_norm = case
    form = Form(H, 0.5, norm, 1e-3, persistent_norm, 1)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape, dtype=dtype):
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    sizes = {"qkv": (3 * C, C), "o": (C, C), "up": (F, C), "down": (C, F)}
    weights = {name: normal(m + 1, *size) * size[1] ** -0.5 for name, size in sizes.items()}
    norms = dict.fromkeys(("n1", "n2", "q_norm", "k_norm"))
    if norm != "none":
        norms = {name: 1 + normal(m + 1, C, dtype=FLOAT) for name in norms}
    slopes = 2.0 ** -torch.arange(1, H + 1, device=DEVICE)
    return form, Matrices(**weights, **norms).of_layers(1, m + 1), slopes, normal


def at(dtype):
    """Return a change of tensors that were low to another dtype."""
    return lambda x: x if x is None or x.dtype == FLOAT else x.to(dtype)


@each_dtype
@cases
def test_leaves_equal_eager(case, dtype):
    (_, S, B, _, C, _), *_ = case
    form, w, slopes, normal = problem(case, dtype)
    x = normal(B, S, C, dtype=FLOAT)
    given = ForwardBuffers.of(x, w, S, form)
    stream = normal(*given.stream.shape, dtype=FLOAT)  # a layer's outputs are the next's inputs
    before = {name: normal(*getattr(given.attending, name).shape) for name in READ_FWD}
    before["lse"][:, 0] = -torch.inf  # a token may be the first
    before["lse"][:, 1] = 200  # what comes before may outweigh the token itself
    before["kt"][:, 2], before["lse"][:, 2] = -100 * before["q"][:, 2], -torch.inf  # or its leaf

    def run(parts, change):
        buffers = ForwardBuffers.of(x, w.map(change), S, form)
        buffers.stream.copy_(stream)
        its = buffers.attending
        for name, value in before.items():
            getattr(its, name).copy_(value)
        its.k.fill_(NAN)
        its.v.fill_(NAN)
        run_tile(Workspace(buffers, w.map(change), slopes, form, parts))
        return {"z": buffers.stream[1:], "k": its.k, "v": its.v}

    assert narrow.is_narrow(given.attending.q, form)
    check(run, dtype)


READ_FWD = ("q", "kt", "vt", "o", "lse")
OF_QUERIES = ("q", "k", "v", "o")
READ_BWD = ("raw", "z", "h", "u", "dk", "dv", "dstream")
WRITTEN = ("dpair", "dnormed", "dz_scaled", "du", "dhn", "dh", "dh_scaled", "do", "delta")


@each_dtype
@cases
def test_leaves_back_equal_eager(case, dtype):
    (_, S, B, _, C, _), *_ = case
    form, w, slopes, normal = problem(case, dtype)
    x = normal(B, S, C, dtype=FLOAT)
    given = BackwardBuffers.of(x, w, S, form)
    read = {name: normal(*getattr(given, name).shape) for name in READ_BWD}
    attending = {name: normal(*getattr(given.attending, name).shape) for name in OF_QUERIES}
    lse = 3 + normal(*given.attending.lse.shape, dtype=FLOAT)

    def run(parts, change):
        buffers = BackwardBuffers.of(x, w.map(change), S, form)
        for name, value in read.items():
            getattr(buffers, name).copy_(value)
        for name, value in attending.items():
            getattr(buffers.attending, name).copy_(value)
        buffers.attending.lse.copy_(lse)
        for name in WRITTEN:
            getattr(buffers, name).fill_(NAN)
        run_tile_bwd(Workspace(buffers, w.map(change), slopes, form, parts))
        buffers.delta[:, 0] = 0  # nothing in the tile reads it
        return {name: getattr(buffers, name) for name in ("u", "dk", *WRITTEN)}

    check(run, dtype, factor=3.0)  # as for the backward of every recurrence


def check(run, dtype, factor=2.0):
    """Compare the kernels with PyTorch, in float32 and in the dtype."""
    found, low, truth = run(kernels, at(dtype)), run(eager, at(dtype)), run(eager, at(FLOAT))
    for name, wanted in truth.items():
        exact = found[name].dtype == FLOAT == dtype
        yardstick = None if exact else low[name]
        assert_close(name, found[name], wanted, rtol=RTOL[dtype], low=yardstick, factor=factor)


def test_wide_layers_many_rows_and_blocks_are_done_elsewhere():
    x, form = torch.zeros(1, 1, 4, narrow.CHANNELS), Form(2, 1.0, "rms", 1e-5, True, 1)
    assert narrow.is_narrow(x, form)
    assert not narrow.is_narrow(torch.zeros(1, 1, 4, narrow.CHANNELS + 1), form)
    assert not narrow.is_narrow(x.expand(products.PROGRAMS + 1, -1, -1, -1), form)
    assert not narrow.is_narrow(x, form._replace(block_size=2))
    assert not eager.narrow_leaf(x, range(1))
    assert not eager.narrow_leaf_bwd(x, range(1))


def test_a_nan_stays_in_its_row():
    case = CASES["the paper's"]
    form, w, slopes, normal = problem(case, FLOAT)
    (_, S, B, _, C, _), *_ = case
    x = normal(B, S, C)
    buffers = ForwardBuffers.of(x, w, S, form)
    for tensor in (buffers.stream, *buffers.attending):
        tensor.copy_(normal(*tensor.shape))
    given = buffers.stream.clone()

    def run():
        buffers.stream.copy_(given)
        run_tile(Workspace(buffers, w, slopes, form, kernels))
        return buffers.stream[1:].clone()

    healthy = run()
    given[0, 0, 3, 0] = NAN
    found = run()
    assert found[:, :, 3].isnan().all()
    others = torch.arange(B, device=DEVICE) != 3
    assert torch.equal(found[:, :, others], healthy[:, :, others])


def test_the_pairs_are_those_of_the_outputs_as_they_were_rounded():
    case = CASES["ragged"]
    form, w, slopes, normal = problem(case, FLOAT)
    (_, S, B, _, C, _), *_ = case
    buffers = ForwardBuffers.of(normal(B, S, C, dtype=BFLOAT), w, S, form)
    for tensor in (buffers.stream, *buffers.attending):
        tensor.copy_(normal(*tensor.shape))
    run_tile(Workspace(buffers, w, slopes, form, kernels))
    k, v, normed = (torch.empty_like(buffers.attending.k) for _ in range(3))
    eager.normed(buffers.stream[1:], w.n1, form, normed)
    eager.split_pair(eager.product(normed, w.kv), w.k_norm, form, k, v)
    assert_close("k", buffers.attending.k, k, rtol=1e-5)
    assert_close("v", buffers.attending.v, v, rtol=1e-5)
