"""The three sizes of the model keep the contract."""

import pytest
import torch
from mezzo_core.testing.arguments import check_module_arguments
from mezzo_core.testing.laws import LAWS, each_law
from mezzo_recurrent_transformer import (
    RecurrentBlockConfig,
    RecurrentStackConfig,
    TransformerBlockConfig,
)
from mezzo_recurrent_transformer.block import RecurrentBlock
from torch import nn
from torch.nn.utils import prune

C = 16
BLOCK = RecurrentBlockConfig(head_dim=4, hidden=24)
PARTS = {
    "block": BLOCK,
    "layer norm": RecurrentBlockConfig(head_dim=8, norm="layer", alibi=None),
    "no norm": RecurrentBlockConfig(head_dim=16, norm="none", residual_scale=0.2, alibi="press"),
    "raw persistent pair": RecurrentBlockConfig(head_dim=4, persistent_norm=False, norm_eps=0.1),
    "stack": RecurrentStackConfig(3, BLOCK),
    "transformer": TransformerBlockConfig(head_dim=4),
}


AS_OTHERS = {"layer norm", "raw persistent pair"}
"""Parts with the same state as another part."""


def build(name):
    torch.manual_seed(0)
    part = PARTS[name].build(C)
    for module in part.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
    return part


@pytest.fixture(params=PARTS)
def part(request):
    return build(request.param)


@pytest.mark.parametrize(("name", "law"), each_law(PARTS, AS_OTHERS))
def test_every_law_is_kept(name, law):
    LAWS[law](build(name))


@pytest.mark.parametrize("config", [RecurrentBlockConfig, TransformerBlockConfig])
def test_all_norms_of_a_layer_have_its_epsilon(config):
    layer = config(head_dim=4, norm_eps=0.25).build(C)
    norms = [module for module in layer.modules() if isinstance(module, nn.RMSNorm)]
    assert [norm.eps for norm in norms] == [0.25] * 4


def test_arguments_replaced_are_refused_by_name(part):
    check_module_arguments(part)


@pytest.mark.parametrize("name", ["block", "stack"])
def test_weights_may_be_plain_tensors(name):
    part, x = PARTS[name].build(C), torch.ones(1, 3, C)
    given = {key: weight.detach() for key, weight in part.named_parameters()}
    found = torch.func.grad(
        lambda weights: torch.func.functional_call(part, weights, (x,))[0].sum()
    )(given)
    part(x)[0].sum().backward()
    for key, weight in part.named_parameters():
        assert torch.equal(found[key], weight.grad), key


def test_a_weight_that_a_hook_sets_is_refused():
    part = BLOCK.build(C)
    prune.identity(part.wq, "weight")
    with pytest.raises(TypeError, match=r"wq.weight is set by a hook"):
        part(torch.ones(1, 3, C))


def hooked(part):
    part.register_forward_hook(lambda module, inputs, output: 2 * output)


def biased(part):
    part.bias = nn.Parameter(torch.ones(part.out_features))


def adapted(part):
    part.forward = lambda x: 2 * x


class Adapter(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def replaced(part):
    part.__class__ = Adapter


@pytest.mark.parametrize("config", ["block", "layer norm", "no norm", "stack"])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("wq", hooked),
        ("wv", biased),
        ("mlp", hooked),
        ("mlp.down", replaced),
        ("k_norm", hooked),
        ("mlp_norm", adapted),
    ],
)
def test_a_part_that_does_more_than_its_weight_is_refused(config, name, change):
    """The layers run at once, from weights alone: what else a part does would be left out."""
    module = PARTS[config].build(C)
    layer = module.blocks[1] if config == "stack" else module
    change(layer.get_submodule(name))
    with pytest.raises(TypeError, match=rf"^{name} must"):
        module(torch.ones(1, 3, C))


class OtherBlock(RecurrentBlock):
    def forward(self, x, *args, **kwargs):
        return super().forward(2 * x, *args, **kwargs)


@pytest.mark.parametrize("change", [hooked, lambda part: setattr(part, "__class__", OtherBlock)])
def test_a_layer_of_a_stack_that_does_more_than_its_parts_is_refused(change):
    stack = PARTS["stack"].build(C)
    change(stack.blocks[1])
    with pytest.raises(TypeError, match=r"^blocks\[1\] must"):
        stack(torch.ones(1, 3, C))


def test_a_stack_is_sharded_and_compiled_as_a_whole_since_it_calls_no_block():
    stack = PARTS["stack"].build(C)
    assert [*stack.units()] == [*stack.stages()] == [stack]


def test_a_stack_of_no_layers_is_refused_before_it_is_built():
    with pytest.raises(ValueError, match="num_layers must be 1 or more"):
        RecurrentStackConfig(0)


def test_a_block_may_have_hooks():
    block = BLOCK.build(C)
    calls = []
    block.register_forward_hook(lambda *call: calls.append(call))
    block(torch.ones(1, 3, C))
    assert len(calls) == 1


@pytest.mark.parametrize("config", [RecurrentBlockConfig, TransformerBlockConfig])
@pytest.mark.parametrize("layer", [0, 3])
def test_matrices_that_end_a_branch_start_smaller_with_depth(config, layer):
    torch.manual_seed(0)
    block = config(init_layer=layer).build(256)
    block.init_own_weights()
    for name, weight in block.named_parameters():
        if weight.ndim == 2:
            depth = 2 * (layer + 1) if name.endswith(("wo.weight", "down.weight")) else 1
            told = (weight.shape[1] * depth) ** -0.5
            assert weight.std().item() == pytest.approx(0.987 * told, rel=0.02), name
            assert weight.abs().max() <= 3 * told


def test_each_layer_of_a_stack_knows_its_depth():
    blocks = RecurrentStackConfig(3, BLOCK, "init").blocks()
    assert [(block.init_layer, block.residual_scale) for block in blocks] == [
        (0, 1),
        (1, 1),
        (2, 1),
    ]
