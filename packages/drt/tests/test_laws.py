"""The stack keeps the contract, in each of its forms."""

import math
from dataclasses import replace

import pytest
import torch
from mezzo_core.testing.arguments import check_fields, check_module_arguments
from mezzo_core.testing.laws import LAWS
from mezzo_drt import DRTConfig
from torch import nn
from torch.utils._pytree import tree_leaves

C = 16
SMALL = DRTConfig(
    num_layers=4, chunk_size=3, num_retrieved=2, window_size=6, head_dim=4, hidden=24,
    num_encoder_layers=1,
)  # fmt: skip
FORMS = {
    "one group": SMALL,
    "two groups": replace(SMALL, num_groups=2),
    "as released": replace(SMALL, projections=False),
    "as in the text": replace(SMALL, window_size=100, residual="text", softmax1=False),
    "random": replace(SMALL, num_groups=2, retriever="random"),
    "fixed": replace(SMALL, retriever="fixed"),
    "offload": replace(SMALL, num_groups=2, offload=True),
    "offload, as in the text": replace(SMALL, window_size=100, residual="text", offload=True),
    "chunks of one": replace(SMALL, chunk_size=1, num_retrieved=3),
}


def build(config, d_model=C):
    torch.manual_seed(0)
    stack = config.build(d_model)
    for module in stack.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    return stack.eval()


@pytest.fixture(params=FORMS)
def stack(request):
    return build(FORMS[request.param])


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(stack, law):
    LAWS[law](stack)


@pytest.mark.parametrize("form", FORMS)
def test_arguments_replaced_are_refused_by_name(form):
    few = {"num_layers": 2 * FORMS[form].num_groups}
    check_module_arguments(build(replace(FORMS[form], **few)))


def test_fields_replaced_are_refused_by_name():
    x = torch.randn(1, 7, C)
    check_fields(FORMS["two groups"], lambda config: build(config)(x)[0])


def test_a_state_is_of_plain_tensors_though_weights_are_sharded(stack):
    class Shard(torch.Tensor):
        """Like FSDP's DTensor, of which `new_zeros` makes another."""

    for module in stack.modules():
        for name, weight in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(weight.detach().as_subclass(Shard)))
    assert {type(part) for part in tree_leaves(stack.init_state(2))} == {torch.Tensor}


@pytest.mark.parametrize(("B", "T"), [(0, 3), (2, 0), (0, 0)])
def test_gradients_of_no_tokens_and_of_no_rows_are_empty(stack, B, T):
    x = torch.randn(B, T, C, requires_grad=True)
    for y in (stack(x)[0], stack(x, stack.init_state(B))[0]):
        assert torch.autograd.grad(y.sum(), x)[0].shape == (B, T, C)


def test_rows_of_padding_alone_get_zeros_and_give_no_gradient(stack):
    x = torch.full((2, 3, C), math.nan, requires_grad=True)
    none = torch.zeros(2, dtype=torch.int64)
    y, _ = stack(x, stack.init_state(2), lengths=none)
    assert torch.equal(y, torch.zeros(2, 3, C))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(2, 3, C))
