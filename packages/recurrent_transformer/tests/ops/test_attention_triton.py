"""The attention kernels against `eager`: here in the interpreter, or on a GPU."""

import pytest
import torch
from mezzo_recurrent_transformer.ops.recurrent_layers import eager
from mezzo_recurrent_transformer.ops.recurrent_layers import triton as kernels
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    Attending,
    BackwardBuffers,
    Keys,
    Later,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import Workspace

from .comparison import DEVICE, NAN, assert_same, each_dtype, normal, wide


def form_of(H, b=1):
    return Form(H, 1.0, "rms", 1e-6, True, b)


def empty(*shape, dtype=torch.float32):
    return torch.full(shape, NAN, dtype=dtype, device=DEVICE)


def slopes_of(H):
    return torch.linspace(0.4, 0.0, H).to(DEVICE)


def work_of(H, b=1, *, do=None, delta=None, dk=None, dv=None, **tile):
    """Return a workspace with these buffers, and no others."""
    attending = Attending(**dict.fromkeys(Attending._fields) | tile)
    others = dict.fromkeys(BackwardBuffers._fields) | {"do": do, "delta": delta, "dk": dk, "dv": dv}
    buffers = BackwardBuffers(**others | {"attending": attending})
    return Workspace(buffers, None, slopes_of(H), form_of(H, b), None)


def keys_of(m, S, B, C, *, slots, first, seen=None, dtype):
    """Draw keys and values; those of hidden slots are NaN."""
    k, v = (normal(m, B, slots, C, dtype=dtype, seed=seed) for seed in (11, 12))
    seen = None if seen is None else torch.tensor(seen, device=DEVICE)
    keys = Keys(k, v, seen, first)
    hidden = torch.arange(slots, device=DEVICE) >= keys.before(S)[..., None]
    assert hidden.any()
    for x in (k, v):
        x.masked_fill_(hidden[..., None], NAN)
    return keys


SHAPES = {
    "one layer": {"m": 1, "S": 16, "B": 2, "H": 2, "D": 64, "slots": 70, "first": 65},
    "layers at their places": {"m": 3, "S": 16, "B": 1, "H": 2, "D": 8, "slots": 90, "first": 32},
    "short tile": {"m": 2, "S": 5, "B": 1, "H": 3, "D": 32, "slots": 40, "first": 10},
    "many queries": {"m": 1, "S": 80, "B": 1, "H": 2, "D": 16, "slots": 90, "first": 80},
    "rows of a past": {
        "m": 2, "S": 16, "B": 3, "H": 4, "D": 8, "slots": 60, "first": 16, "seen": [30, 0, 7],
    },
}  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@each_dtype
@shapes
def test_attend_earlier_is_that_of_eager(shape, dtype):
    m, S, B, H, D = (shape[name] for name in "mSBHD")
    past = {name: x for name, x in shape.items() if name not in "mSBHD"}
    q, keys = normal(m, S, B, H * D, dtype=dtype), keys_of(m, S, B, H * D, **past, dtype=dtype)
    found, truth = ([empty(m, S, B, C) for C in (H * D, H)] for _ in range(2))
    kernels.attend_earlier(work_of(H, q=q, o=found[0], lse=found[1]), keys)
    eager.attend_earlier(work_of(H, q=wide(q), o=truth[0], lse=truth[1]), wide(keys))
    assert_same(("o", "lse"), found, truth, truth, dtype)


BLOCKS = {
    "b = 1": {"m": 2, "S": 16, "B": 2, "H": 2, "D": 32, "b": 1, "slots": 40, "first": 16},
    "b = 4": {"m": 1, "S": 16, "B": 1, "H": 1, "D": 64, "b": 4, "slots": 80, "first": 70},
    "one block": {"m": 1, "S": 16, "B": 1, "H": 4, "D": 8, "b": 16, "slots": 20, "first": 16},
    "odd blocks": {"m": 2, "S": 21, "B": 1, "H": 1, "D": 16, "b": 7, "slots": 70, "first": 63},
    "short tile": {"m": 1, "S": 3, "B": 2, "H": 1, "D": 16, "b": 1, "slots": 10, "first": 3},
    "long blocks": {"m": 1, "S": 88, "B": 1, "H": 2, "D": 8, "b": 44, "slots": 90, "first": 30},
    "a block of several tiles of queries": {
        "m": 1, "S": 150, "B": 1, "H": 1, "D": 16, "b": 150, "slots": 9, "first": 0,
    },
    "rows of a past": {
        "m": 2, "S": 16, "B": 2, "H": 1, "D": 16, "b": 2, "slots": 60, "first": 16, "seen": [9, 0],
    },
}  # fmt: skip


@each_dtype
@pytest.mark.parametrize("shape", BLOCKS.values(), ids=BLOCKS)
def test_attention_of_a_tile_and_its_gradients_are_those_of_eager(shape, dtype):
    m, S, B, H, D, b = (shape[name] for name in "mSBHDb")
    C = H * D
    past = {name: x for name, x in shape.items() if name not in "mSBHDb"}
    keys = keys_of(m, S, B, C, **past, dtype=dtype)
    drawn = [normal(m, S, B, C, dtype=dtype, seed=seed) for seed in range(6)]
    *pairs, do = drawn

    def run(part, change):
        kept = change(keys)
        q, kt, vt, k, v = map(change, pairs)
        o, lse, delta = torch.full_like(q, NAN), empty(m, S, B, H), empty(m, S, B, H)
        tile = {"q": q, "kt": kt, "vt": vt, "k": k, "v": v, "o": o, "lse": lse}
        work = work_of(H, b, do=change(do), delta=delta, **tile)
        part.attend_tile(work, kept)
        eager.head_products(change(do), o, delta)
        dqkv = torch.full_like(q.repeat(1, 1, 1, 3), NAN)
        part.attend_tile_bwd(work, kept, dqkv)
        return o, lse, *dqkv.chunk(3, -1)

    same = lambda x: x  # noqa: E731
    found, low, truth = run(kernels, same), run(eager, same), run(eager, wide)
    assert_same(("o", "lse", "dq", "dkt", "dvt"), found, low, truth, dtype)


LATER = {
    "one layer": {"m": 1, "S": 16, "B": 2, "H": 2, "D": 64, "T": 96, "begin": 16},
    "layers at their places": {"m": 3, "S": 16, "B": 1, "H": 2, "D": 8, "T": 64, "begin": 64},
    "short tile": {"m": 2, "S": 5, "B": 1, "H": 3, "D": 32, "T": 20, "begin": 10},
    "many keys": {"m": 1, "S": 40, "B": 1, "H": 1, "D": 16, "T": 120, "begin": 40},
    "no later token": {"m": 1, "S": 16, "B": 1, "H": 1, "D": 16, "T": 32, "begin": 32},
}  # fmt: skip


@each_dtype
@pytest.mark.parametrize("shape", LATER.values(), ids=LATER)
def test_pairs_bwd_is_that_of_eager(shape, dtype):
    m, S, B, H, D, T, begin = (shape[name] for name in (*"mSBHDT", "begin"))
    C = H * D
    k, v = (normal(m, S, B, C, dtype=dtype, seed=seed) for seed in range(2))
    q, do = (normal(m, B, T, C, dtype=dtype, seed=seed) for seed in (2, 3))
    lse, delta = (normal(m, B, T, H, seed=seed) for seed in (4, 5))
    # Tokens before the end of the tile give nothing, whatever they hold.
    places = torch.arange(T, device=DEVICE)
    before = places < (begin - S * torch.arange(m, device=DEVICE))[:, None]
    later = Later(q, do, lse.add_(3.0), delta, begin)
    for x in later[:4]:
        x.masked_fill_(before[:, None, :, None], NAN)
    found, truth = ([empty(m, S, B, C) for _ in range(2)] for _ in range(2))
    kernels.pairs_bwd(work_of(H, k=k, v=v, dk=found[0], dv=found[1]), later)
    eager.pairs_bwd(work_of(H, k=wide(k), v=wide(v), dk=truth[0], dv=truth[1]), wide(later))
    assert_same(("dk", "dv"), found, truth, truth, dtype)
    assert truth[0].any() == (begin - S * (m - 1) < T)
