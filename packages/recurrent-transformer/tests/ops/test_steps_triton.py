"""The kernels of a step's attention against the same in PyTorch."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer.ops.recurrent_layers import Form, eager, operands

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
RTOL = {torch.bfloat16: 5e-3, torch.float32: 1e-5}
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
        (1, 40, 2, 1, 128, "rms", 20),  # more earlier tokens than a program takes at once
        (2, 20, 1, 2, 64, "none", 20),  # one step
        (1, 140, 1, 2, 8, "layer", 70),  # a block of several programs
    ],
)


def normal(*shape, dtype=torch.float32):
    return torch.randn(*shape, device=DEVICE).to(dtype)


def tile_of(m, S, B, H, C, dtype):
    """Random contents; o as the forward has it."""
    q, kt, vt, k, v = (normal(m, S, B, C, dtype=dtype) for _ in range(5))
    return operands.Attending(q, kt, vt, k, v, normal(m, S, B, C), normal(m, S, B, H))


def wide(x):
    return None if x is None else x.float()


def assert_same(names, found, low, truth, dtype):
    """Compare with `eager` in float32; what is rounded to 16 bits also with its own rounding."""
    for name, out, yardstick, ref in zip(names, found, low, truth, strict=True):
        rounded = out.dtype != torch.float32
        assert_close(name, out, ref, rtol=RTOL[dtype], low=yardstick if rounded else None)


@dtypes
@cases
def test_forward_steps_equal_eager(m, S, B, H, D, norm, b, dtype):
    torch.manual_seed(0)
    C, form = H * D, Form(H, 1.0, norm, 1e-5, True, b)
    tile, slopes = tile_of(m, S, B, H, C, dtype), torch.rand(H, device=DEVICE)
    tile.lse[:, 0] = -torch.inf
    tile.o[:, 0] = 0
    weight = None if norm == "none" else normal(m, C)
    for step in {0, min(1, S // b - 1), S // b // 2, S // b - 1}:
        begin, stored = step * b, max(step - 1, 0) * b
        kv = None if step == 0 else normal(m, b, B, 2 * C, dtype=dtype)

        def run(parts, change, step=step, begin=begin, stored=stored, kv=kv):
            its = operands.Attending(*(change(x).clone() for x in tile))
            its.k[:, stored:], its.v[:, stored:] = torch.nan, torch.nan
            out = torch.full_like(its.q[:, :b], torch.nan).contiguous()
            parts.attend_step(its, change(kv), weight, slopes, form, step, out)
            return out, its.k[:, :begin], its.v[:, :begin]

        same = lambda x: x  # noqa: E731
        found, low, truth = run(steps, same), run(eager, same), run(eager, wide)
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
        its = operands.Attending(*(change(x) for x in tile))
        delta, its_do = (torch.full_like(x, torch.nan) for x in (tile.lse, change(do)))
        its_dk, its_dv = dk.clone(), dv.clone()
        dpair = torch.full_like(its_do.repeat(1, 1, 1, 2), torch.nan)
        for step in reversed(range(S // b)):
            after = slice((step + 1) * b, S)
            its_do[:, after] = do[:, after]  # those of earlier steps are not yet known
            parts.pairs_step_bwd(
                its, its_do, delta, change(raw), weight, slopes, form, step, its_dk, its_dv, dpair
            )
        return its_dk, its_dv, dpair, delta[:, b:]

    same = lambda x: x  # noqa: E731
    found, low, truth = run(steps, same), run(eager, same), run(eager, wide)
    assert_same(("dk", "dv", "dpair", "delta"), found, low, truth, dtype)
