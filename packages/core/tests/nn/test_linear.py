"""When a linear layer uses `decode_linear`, and when it is torch's own."""

import pytest
import torch
from mezzo_core.nn import linear as module
from mezzo_core.nn.linear import Linear, is_plain
from torch import nn
from torch.nn.utils import parametrizations

X = torch.randn(1, 1, 6, generator=torch.Generator().manual_seed(0))


class Doubled(Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class TaggedTensor(torch.Tensor):
    pass


def doubled_by_hook():
    layer = Linear(6, 4)
    layer.register_forward_hook(lambda *call: 2 * call[-1])
    return layer


def doubled_by_pre_hook():
    layer = Linear(6, 4, bias=False)
    layer.register_forward_pre_hook(lambda _, inputs: (2 * inputs[0],))
    return layer


def doubled_by_hand():
    layer = Linear(6, 4)
    call = layer.forward
    layer.forward = lambda x: 2 * call(x)
    return layer


def tagged():
    layer = Linear(6, 4)
    layer.weight = nn.Parameter(layer.weight.detach().as_subclass(TaggedTensor))
    return layer


OTHERS = {
    "subclass": lambda: Doubled(6, 4),
    "hook": doubled_by_hook,
    "pre-hook": doubled_by_pre_hook,
    "own forward": doubled_by_hand,
    "parametrized": lambda: parametrizations.weight_norm(Linear(6, 4)),
    "another kind of tensor": tagged,
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_layer_that_does_more_still_does_it(name):
    layer = OTHERS[name]()
    assert not is_plain(layer)
    with torch.no_grad():
        found = layer(X)
    torch.testing.assert_close(found, layer(torch.cat([X, X]))[:1].detach())


@pytest.mark.parametrize("name", ["parametrized", "another kind of tensor"])
def test_a_weight_of_another_kind_is_multiplied_by_torch(name, monkeypatch):
    layer = OTHERS[name]()
    monkeypatch.setattr(module, "decode_linear", None)
    with torch.no_grad():
        layer(X)


def test_many_rows_and_gradients_are_torch_s(monkeypatch):
    layer, many = Linear(6, 4), torch.randn(2, 1, 6)
    monkeypatch.setattr(module, "decode_linear", None)
    assert layer(X).requires_grad
    with torch.no_grad():
        assert torch.equal(layer(many), nn.Linear.forward(layer, many))


@pytest.mark.parametrize("bias", [False, True])
def test_one_row_is_the_op_s(bias, monkeypatch):
    layer = Linear(6, 4, bias=bias)
    assert is_plain(layer)
    with torch.no_grad():
        expected = layer(X)
        torch.testing.assert_close(expected, nn.Linear.forward(layer, X))
        monkeypatch.setattr(module, "F", None)
        assert torch.equal(layer(X), expected)
