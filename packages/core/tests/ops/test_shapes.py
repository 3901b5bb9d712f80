"""The table of shapes by which ops check their tensors."""

import pytest
import torch
from mezzo_core.ops.shapes import Shapes
from torch import nn

SHAPES = Shapes(x="B T C", weight="C | None", filled="C")


class Chosen(nn.Module):
    def forward(self, x, keep):
        x = x[keep.nonzero()[:, 0]]
        SHAPES.check("op", x, None)
        return x


def test_sizes_that_data_tell_are_not_asked_whether_they_are_0():
    x, keep = torch.randn(4, 3, 2), torch.tensor([True, False, True, True])
    program = torch.export.export(Chosen(), (x, keep), strict=False)
    assert torch.equal(program.module()(x, ~keep), x[1:2])


def test_a_graph_says_which_shape_is_wrong():
    def call(x, weight):
        SHAPES.check("op", x, weight)
        return x

    x, weight = torch.randn(4, 3, 2), torch.randn(3)
    with pytest.raises(ValueError, match=r"op: weight must be \(2,\), got \(3,\)"):
        call(x, weight)
    with pytest.raises(Exception, match=r"Observed exception|weight must be"):
        torch.compile(call, fullgraph=True, backend="eager")(x, weight)
