"""Norms of inputs and weights of two dtypes."""

import warnings

import pytest
import torch
from mezzo_core.nn.norm import RMSNorm, build_norm
from mezzo_core.testing import assert_close
from torch import nn

RTOL = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-3, torch.float16: 5e-3}


@pytest.mark.parametrize("weight", RTOL)
@pytest.mark.parametrize("dtype", RTOL)
def test_it_is_pytorchs_norm_without_its_warning(dtype, weight):
    torch.manual_seed(0)
    ours, plain = RMSNorm(48, eps=1e-5).to(weight), nn.RMSNorm(48, eps=1e-5).double()
    nn.init.normal_(ours.weight)
    plain.load_state_dict(ours.state_dict())
    x, dy = (torch.randn(5, 7, 48).to(dtype) for _ in range(2))

    def run(norm, x, dy):
        x = x.requires_grad_()
        y = norm(x)
        return y, *torch.autograd.grad(y, (x, norm.weight), dy)

    right = run(plain, x.double(), dy.double())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = run(ours, x, dy)
    dtypes = {"y": dtype, "dx": dtype, "dw": weight}
    for (name, its), out, ref in zip(dtypes.items(), found, right, strict=True):
        assert out.dtype == its
        assert_close(name, out, ref, rtol=RTOL[its])


def test_a_layer_norm_has_its_inputs_dtype_where_autocast_makes_it_wide(monkeypatch):
    """As autocast does on a GPU."""
    real = nn.functional.layer_norm
    monkeypatch.setattr(nn.functional, "layer_norm", lambda x, *rest: real(x.float(), *rest))
    x = torch.randn(5, 48).bfloat16()
    y = build_norm("layer", 48, 1e-5)(x)
    assert y.dtype == torch.bfloat16
    assert_close("y", y.float(), real(x.float(), (48,)), rtol=5e-3)
