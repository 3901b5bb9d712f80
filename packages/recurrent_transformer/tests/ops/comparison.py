"""How kernels are compared with `eager`: where, on what, in which dtypes and how closely."""

import pytest
import torch
from mezzo_core.testing import assert_close

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
RTOL = {FLOAT: 1e-5, BFLOAT: 5e-3, HALF: 5e-3}
NAN = float("nan")
each_dtype = pytest.mark.parametrize(
    "dtype",
    [FLOAT, *(pytest.param(low, marks=pytest.mark.gpu) for low in (BFLOAT, HALF))],
    ids=str,
)


def normal(*shape, dtype=FLOAT, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def wide(x):
    """Copy a tensor, or those of a tuple, to float32."""
    if isinstance(x, tuple):
        return type(x)(*(wide(part) for part in x))
    return x.to(FLOAT, copy=True) if torch.is_tensor(x) and x.is_floating_point() else x


def assert_same(names, found, low, truth, dtype):
    """Compare with `eager` in float32; a 16-bit output also with `eager` in 16 bits."""
    for name, out, yardstick, ref in zip(names, found, low, truth, strict=True):
        rounded = out.dtype != FLOAT
        assert_close(name, out, ref, rtol=RTOL[dtype], low=yardstick if rounded else None)
