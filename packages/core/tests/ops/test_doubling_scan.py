"""The scan by doubling, which stands in exports to ONNX, is the linear scan."""

import pytest
import torch
from mezzo_core.ops.scan import linear_scan
from mezzo_core.ops.scan.doubling import doubling_scan
from mezzo_core.testing import assert_close
from torch import nn
from torch.export import Dim


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 33])
@pytest.mark.parametrize("chunk_size", [None, 1, 4, 6])
@pytest.mark.parametrize("begins", [False, True])
def test_it_is_the_linear_scan(num_tokens, chunk_size, begins):
    generator = torch.Generator().manual_seed(0)
    a, x, h0 = (torch.randn(2, T, 3, generator=generator) for T in (num_tokens, num_tokens, 1))
    h0 = h0[:, 0] if begins else None
    found = doubling_scan(a, x, h0, None, chunk_size or 0, "reference")
    wanted = linear_scan(a, x, initial_state=h0, chunk_size=chunk_size)
    for name, mine, truth in zip(("h", "last"), found, wanted, strict=True):
        assert_close(name, mine, truth, rtol=1e-5)


class Scan(nn.Module):
    def forward(self, a, x):
        return doubling_scan(a, x, None, None, 0, "reference")[0]


def test_an_export_scans_texts_of_any_length():
    a, x = torch.rand(2, 1, 100, 3)
    tokens = Dim("tokens", min=2)
    shapes = ({1: tokens}, {1: tokens})
    program = torch.export.export(Scan(), (a[:, :9], x[:, :9]), dynamic_shapes=shapes)
    assert_close("h", program.module()(a, x), linear_scan(a, x)[0], rtol=1e-5)


def test_packed_sequences_are_refused():
    x = torch.randn(1, 5, 3)
    with pytest.raises(ValueError, match="an export to ONNX takes no packed sequences"):
        doubling_scan(x, x, None, torch.tensor([0, 2, 5]), 0, "reference")
