"""The stack keeps the contract, in each of its forms."""

import math
from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import AttentionConfig
from mezzo_core.testing.arguments import check_fields, check_module_arguments
from mezzo_core.testing.laws import LAWS, OF_STATES
from mezzo_drt import DRTConfig
from torch import nn

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
    "mixers below": replace(
        SMALL, num_groups=2, lower=(AttentionConfig(4), AttentionConfig(4, window_size=4))
    ),
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


def is_another(form, law):
    """Tell whether a form can keep a law, and is not for this law as one that is there."""
    if law in OF_STATES:
        return form in ("two groups", "offload", "chunks of one", "mixers below")
    return (form, law) != ("fixed", "gradients")  # its keys are detached means: it learns nothing


@pytest.mark.parametrize(
    ("form", "law"), [(form, law) for form in FORMS for law in LAWS if is_another(form, law)]
)
def test_every_law_is_kept(form, law):
    LAWS[law](build(FORMS[form]))


# One form of each state and each retriever; other differences concern no argument.
@pytest.mark.parametrize("form", ["one group", "two groups", "fixed", "offload", "chunks of one"])
def test_arguments_replaced_are_refused_by_name(form):
    few = {"num_layers": 2 * FORMS[form].num_groups}
    check_module_arguments(build(replace(FORMS[form], **few)))


def test_fields_replaced_are_refused_by_name():
    x = torch.randn(1, 7, C)
    check_fields(FORMS["two groups"], lambda config: build(config)(x)[0])


def test_rows_of_padding_alone_get_zeros_and_give_no_gradient(stack):
    x = torch.full((2, 3, C), math.nan, requires_grad=True)
    none = torch.zeros(2, dtype=torch.int64)
    y, _ = stack(x, stack.init_state(2), lengths=none)
    assert torch.equal(y, torch.zeros(2, 3, C))
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], torch.zeros(2, 3, C))
