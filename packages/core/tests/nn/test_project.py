"""Where the op takes a layer's place, and where the layer is called."""

import pytest
import torch
from mezzo_core.nn import project as module
from mezzo_core.nn.project import project
from torch import nn
from torch.nn.utils import parametrizations

X = torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(0))


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class TaggedTensor(torch.Tensor):
    pass


def doubled_by_hook():
    layer = nn.Linear(6, 4)
    layer.register_forward_hook(lambda *call: 2 * call[-1])
    return layer


def doubled_by_pre_hook():
    layer = nn.Linear(6, 4, bias=False)
    layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    return layer


def doubled_by_hand():
    layer = nn.Linear(6, 4)
    call = layer.forward
    layer.forward = lambda x: 2 * call(x)
    return layer


def tagged():
    layer = nn.Linear(6, 4)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(TaggedTensor))
    return layer


OTHERS = {
    "subclass": lambda: Doubled(6, 4),
    "hook": doubled_by_hook,
    "pre-hook": doubled_by_pre_hook,
    "own forward": doubled_by_hand,
    "parametrized": lambda: parametrizations.weight_norm(nn.Linear(6, 4)),
    "another kind of tensor": tagged,
}


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_do_more_are_called(name, monkeypatch):
    layer = OTHERS[name]()
    monkeypatch.setattr(module, "decode_linear", None)
    with torch.no_grad():
        assert torch.equal(project(layer, X), layer(X))


def test_many_rows_and_gradients_are_the_layer_s(monkeypatch):
    layer, many = nn.Linear(6, 4), torch.randn(2, 1, 6)
    monkeypatch.setattr(module, "decode_linear", None)
    assert torch.equal(project(layer, X), layer(X))
    assert project(layer, X).requires_grad
    with torch.no_grad():
        assert torch.equal(project(layer, many), layer(many))


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_through_a_plain_layer_is_the_op_s(bias, monkeypatch):
    layer = nn.Linear(6, 4, bias=bias)
    with torch.no_grad():
        expected = layer(X)
        monkeypatch.setattr(nn.Linear, "__call__", None)
        assert torch.equal(project(layer, X), expected)
