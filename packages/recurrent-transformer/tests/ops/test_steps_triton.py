"""The kernels of a step's attention against the same in PyTorch."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer.ops.recurrent_layers import Form, eager, operands

pytest.importorskip("triton")
from mezzo_recurrent_transformer.ops.recurrent_layers.triton import steps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CASES = [
    (1, 16, 2, 4, 16, "rms"),
    (3, 5, 1, 3, 32, "layer"),
    (2, 16, 3, 6, 16, "none"),
    (2, 1, 2, 1, 16, "rms"),
]


def normal(*shape):
    return torch.randn(*shape, device=DEVICE)


def tile_of(m, S, B, H, C):
    """Random contents; what is not yet known is NaN."""
    q, kt, vt, k, v, o = (normal(m, S, B, C) for _ in range(6))
    return operands.Attending(q, kt, vt, k, v, o, normal(m, S, B, H))


@pytest.mark.parametrize(("m", "S", "B", "H", "D", "norm"), CASES)
def test_forward_steps_equal_eager(m, S, B, H, D, norm):
    torch.manual_seed(0)
    C, form = H * D, Form(H, 1.0, norm, 1e-5, True, 1)
    tile, slopes = tile_of(m, S, B, H, C), torch.rand(H, device=DEVICE)
    tile.lse[:, 0] = -torch.inf
    tile.o[:, 0] = 0
    weight = None if norm == "none" else normal(m, C)
    for step in {0, min(1, S - 1), S // 2, S - 1}:
        kv = None if step == 0 else normal(m, 1, B, 2 * C)
        found = []
        for parts in (eager, steps):
            k, v = tile.k.clone(), tile.v.clone()
            k[:, max(step - 1, 0) :], v[:, max(step - 1, 0) :] = torch.nan, torch.nan
            out = torch.full_like(tile.q[:, :1], torch.nan)
            its = tile._replace(k=k, v=v)
            parts.attend_step(its, kv, weight, slopes, form, step, out)
            found.append((out, k[:, :step], v[:, :step]))
        for name, ref, own in zip(("out", "k", "v"), *found, strict=True):
            assert_close(name, own, ref, rtol=1e-5)


@pytest.mark.parametrize(("m", "S", "B", "H", "D", "norm"), CASES)
def test_backward_steps_equal_eager(m, S, B, H, D, norm):
    torch.manual_seed(0)
    C, form = H * D, Form(H, 1.0, norm, 1e-5, True, 1)
    tile, slopes = tile_of(m, S, B, H, C), torch.rand(H, device=DEVICE)
    tile.lse.add_(6)  # weights below one
    weight = None if norm == "none" else normal(m, C)
    raw, do, dk, dv = (normal(m, S, B, C) for _ in range(4))
    found = []
    for parts in (eager, steps):
        delta = torch.full_like(tile.lse, torch.nan)
        its_dk, its_dv = dk.clone(), dv.clone()
        dpair = torch.full((m, S, B, 2 * C), torch.nan, device=DEVICE)
        for step in reversed(range(S)):
            parts.pairs_step_bwd(
                tile, do, delta, raw, weight, slopes, form, step, its_dk, its_dv, dpair
            )
        found.append((its_dk, its_dv, dpair, delta[:, 1:]))
    for name, ref, own in zip(("dk", "dv", "dpair", "delta"), *found, strict=True):
        assert_close(name, own, ref, rtol=1e-5)
