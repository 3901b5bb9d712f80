"""The kernels of a step's attention against the same in PyTorch."""

import pytest
import torch
from mezzo_recurrent_transformer.ops.recurrent_layers import Form, eager
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    Attending,
    BackwardBuffers,
    ForwardBuffers,
    Matrices,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.tiles import leaf_size
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Workspace

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers import triton as kernels

from .comparison import DEVICE, assert_same, wide

dtypes = pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)], ids=str
)
cases = pytest.mark.parametrize(
    ("m", "S", "B", "H", "D", "norm", "b"),
    [
        (1, 16, 2, 4, 16, "rms", 1),
        (3, 5, 1, 3, 32, "layer", 1),
        (2, 16, 3, 6, 16, "none", 1),
        (2, 1, 2, 1, 16, "rms", 1),
        (2, 16, 1, 3, 32, "layer", 2),
        (2, 16, 2, 4, 8, "rms", 8),
        (1, 40, 2, 1, 128, "rms", 1),  # three leaves, of which the last is cut
        (2, 44, 1, 2, 16, "layer", 11),  # two leaves of two steps
        (2, 20, 1, 2, 64, "none", 20),  # one step
        (1, 140, 1, 2, 8, "layer", 70),  # a block of several programs
    ],
)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def tile_of(m, S, B, H, C, dtype):
    """Random contents, with o in float32 as in the forward."""
    q, kt, vt, k, v = (normal(m, S, B, C, dtype=dtype) for _ in range(5))
    return Attending(q, kt, vt, k, v, normal(m, S, B, C), normal(m, S, B, H))


def work_of(form, slopes, tile, k_norm=None, **others):
    """A workspace with these buffers, and no others."""
    buffers = ForwardBuffers(None, tile)
    if others:
        blank = dict.fromkeys(BackwardBuffers._fields)
        buffers = BackwardBuffers(**blank | others | {"attending": tile})
    weights = Matrices(**dict.fromkeys(Matrices._fields) | {"k_norm": k_norm})
    return Workspace(buffers, weights, slopes, form, None)


@dtypes
@cases
def test_forward_steps_equal_eager(m, S, B, H, D, norm, b, dtype):
    torch.manual_seed(0)
    C, form = H * D, Form(H, 1.0, norm, 1e-5, True, b)
    tile, slopes = tile_of(m, S, B, H, C, dtype), torch.rand(H, device=DEVICE)
    tile.lse[:, 0] = -torch.inf
    tile.o[:, 0] = 0
    if b == 1 and S > 2:  # what comes before, or the leaf, may outweigh the token itself
        tile.lse[:, S // 2] = 200
        tile.kt[:, 1], tile.lse[:, 1] = -100 * tile.q[:, 1], -torch.inf
    weight = None if norm == "none" else normal(m, C)
    for step in {0, min(1, S // b - 1), S // b // 2, S // b - 1}:
        begin = step * b
        is_first = begin % leaf_size(b) == 0
        stored = begin if is_first else begin - b
        kv = None if is_first else normal(m, b, B, 2 * C, dtype=dtype)

        def run(parts, change, step=step, begin=begin, stored=stored, kv=kv):
            its = Attending(*(change(x).clone() for x in tile))
            its.k[:, stored:], its.v[:, stored:] = torch.nan, torch.nan
            out = torch.full_like(its.q[:, :b], torch.nan).contiguous()
            parts.attend_step(work_of(form, slopes, its, weight), change(kv), step, out)
            return out, its.k[:, :begin], its.v[:, :begin]

        same = lambda x: x  # noqa: E731
        found, low, truth = run(kernels, same), run(eager, same), run(eager, wide)
        assert_same(("out", "k", "v"), found, low, truth, dtype)


@dtypes
@cases
def test_backward_steps_equal_eager(m, S, B, H, D, norm, b, dtype):
    torch.manual_seed(0)
    C, form = H * D, Form(H, 1.0, norm, 1e-5, True, b)
    tile, slopes = tile_of(m, S, B, H, C, dtype), torch.rand(H, device=DEVICE)
    tile = tile._replace(o=tile.o.to(dtype))
    tile.lse.add_(6)  # weights below one
    weight = None if norm == "none" else normal(m, C)
    raw, do = (normal(m, S, B, C, dtype=dtype) for _ in range(2))
    dk, dv = (normal(m, S, B, C) for _ in range(2))

    def run(parts, change):
        its = Attending(*(change(x) for x in tile))
        delta, its_do = (torch.full_like(x, torch.nan) for x in (tile.lse, change(do)))
        its_dk, dpair = dk.clone(), torch.full_like(its_do.repeat(1, 1, 1, 2), torch.nan)
        others = {"do": its_do, "delta": delta, "raw": change(raw), "dk": its_dk, "dv": dv}
        work = work_of(form, slopes, its, weight, dpair=dpair, **others)
        for step in reversed(range(S // b)):
            after = slice((step + 1) * b, S)
            its_do[:, after] = do[:, after]  # those of earlier steps are not yet known
            parts.pairs_step_bwd(work, step)
        known = [i for i in range(S) if i % leaf_size(b) >= b]
        return its_dk, dpair, delta[:, known]

    same = lambda x: x  # noqa: E731
    found, low, truth = run(kernels, same), run(eager, same), run(eager, wide)
    assert_same(("dk", "dpair", "delta"), found, low, truth, dtype)


LEAVES = {
    "one leaf": (2, 32, 2, 4, 16, 16, 16),
    "two leaves": (1, 64, 1, 2, 64, 32, 32),
    "the last": (1, 64, 2, 6, 8, 48, 16),
    "long": (1, 140, 1, 1, 32, 70, 70),
    "odd": (3, 42, 1, 2, 16, 21, 21),
}
leaves = pytest.mark.parametrize("case", LEAVES.values(), ids=LEAVES)


@dtypes
@leaves
def test_leaves_attend_to_leaves_as_in_eager(case, dtype):
    torch.manual_seed(0)
    m, S, B, H, D, begin, size = case
    tile, form = tile_of(m, S, B, H, H * D, dtype), Form(H, 1.0, "rms", 1e-5, True, 1)
    slopes, unseen = torch.rand(H, device=DEVICE), slice(begin, begin + size // 2)
    tile.lse[:, unseen] = -torch.inf
    tile.o[:, unseen] = 0
    tile.k[:, begin:], tile.v[:, begin:] = torch.nan, torch.nan

    def run(parts, change):
        its = Attending(*(change(x).clone() for x in tile))
        parts.attend_leaves(work_of(form, slopes, its), begin, size)
        return its.o, its.lse

    truth = run(eager, wide)
    assert_same(("o", "lse"), run(kernels, lambda x: x), truth, truth, dtype)
    assert not torch.equal(truth[0], tile.o)


@dtypes
@leaves
def test_gradients_of_leaves_are_those_of_eager(case, dtype):
    torch.manual_seed(0)
    m, S, B, H, D, begin, size = case
    C, form = H * D, Form(H, 1.0, "rms", 1e-5, True, 1)
    tile, slopes = tile_of(m, S, B, H, C, dtype), torch.rand(H, device=DEVICE)
    tile = tile._replace(o=tile.o.to(dtype))
    tile.lse.add_(4)  # weights below one
    do, delta = normal(m, S, B, C, dtype=dtype), normal(m, S, B, H)
    dk, dv = (normal(m, S, B, C) for _ in range(2))
    for x in (do, delta):  # those of earlier tokens are not yet known
        x[:, :begin] = torch.nan

    def run(parts, change):
        its, its_dk, its_dv = Attending(*map(change, tile)), dk.clone(), dv.clone()
        others = {"do": change(do), "delta": delta, "dk": its_dk, "dv": its_dv}
        parts.leaves_bwd(work_of(form, slopes, its, **others), begin, size)
        return its_dk, its_dv

    truth = run(eager, wide)
    assert_same(("dk", "dv"), run(kernels, lambda x: x), truth, truth, dtype)
    assert not torch.equal(truth[0], dk)
