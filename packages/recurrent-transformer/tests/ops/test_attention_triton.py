"""The attention kernels against `eager`: here in the interpreter, or on a GPU."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer.ops.recurrent_layers import eager
from mezzo_recurrent_transformer.ops.recurrent_layers import triton as kernels
from mezzo_recurrent_transformer.ops.recurrent_layers.eager import Keys
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = [
    pytest.param(torch.bfloat16, marks=pytest.mark.gpu),
    pytest.param(torch.float16, marks=pytest.mark.gpu),
]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, *LOW])
NAN = float("nan")


def form_of(H, b=1):
    return Form(H, 1.0, "rms", 1e-6, True, b)


def normal(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def slopes_of(H):
    return torch.linspace(0.4, 0.0, H).to(DEVICE)


def keys_of(m, S, B, C, *, slots, first, seen=None, dtype=torch.float32):
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
    "layers at their places": {"m": 3, "S": 16, "B": 1, "H": 1, "D": 16, "slots": 90, "first": 32},
    "short tile": {"m": 2, "S": 5, "B": 1, "H": 3, "D": 32, "slots": 40, "first": 10},
    "many queries": {"m": 1, "S": 40, "B": 1, "H": 2, "D": 16, "slots": 50, "first": 40},
    "rows of a past": {
        "m": 2, "S": 16, "B": 3, "H": 1, "D": 16, "slots": 60, "first": 16, "seen": [30, 0, 7],
    },
}  # fmt: skip
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


@dtypes
@shapes
def test_attend_earlier_is_that_of_eager(shape, dtype):
    m, S, B, H, D = (shape[name] for name in "mSBHD")
    past = {name: x for name, x in shape.items() if name not in "mSBHD"}
    q, keys = normal(m, S, B, H * D, dtype=dtype), keys_of(m, S, B, H * D, **past, dtype=dtype)
    found = [torch.full((m, S, B, C), NAN, device=DEVICE) for _ in range(2) for C in (H * D, H)]
    for part, outputs in ((kernels, found[:2]), (eager, found[2:])):
        part.attend_earlier(q, keys, slopes_of(H), form_of(H), *outputs)
    for name, out, ref in zip(("o", "lse"), found[:2], found[2:], strict=True):
        assert_close(name, out, ref, rtol=1e-5 if dtype == torch.float32 else 5e-3)
