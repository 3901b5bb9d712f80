"""The blocks of Zoology's models keep the contract, and compute what they say."""

from functools import partial

import pytest
import torch
from mezzo_core.nn import AttentionConfig
from mezzo_core.testing.arguments import check_module_arguments
from mezzo_core.testing.laws import LAWS
from mezzo_gsa.mqar.blocks import MixerOnlyConfig, PositionsConfig, Seen
from mezzo_gsa.short_conv import ShortConv

C = 8
ATTENTION = AttentionConfig(head_dim=C, rope_base=None)
BLOCKS = {
    "positions": PositionsConfig(100),
    "layer": MixerOnlyConfig(ATTENTION),
    "layer with an identity": MixerOnlyConfig(ATTENTION, identity_mlp=True),
}
PARTS = {f"convolution of {width}": partial(ShortConv, width=width) for width in (1, 3, 6)}
PARTS |= {name: config.build for name, config in BLOCKS.items()}


@pytest.fixture(params=PARTS)
def part(request):
    torch.manual_seed(0)
    part = PARTS[request.param](C).eval()
    part.init_own_weights()
    return part


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(part, law):
    LAWS[law](part)


@pytest.mark.parametrize("name", ["convolution of 3", "positions"])
def test_arguments_replaced_are_refused_by_name(name):
    check_module_arguments(PARTS[name](C))


def test_an_identity_in_the_mlps_place_adds_the_norm():
    torch.manual_seed(0)
    layer = MixerOnlyConfig(ATTENTION, identity_mlp=True).build(C)
    torch.nn.init.uniform_(layer.mlp_norm.weight, 0.5, 2.0)
    x = torch.randn(2, 7, C)
    y = x + layer.mixer(torch.nn.functional.layer_norm(x, (C,)))[0]
    normed = torch.nn.functional.layer_norm(y, (C,)) * layer.mlp_norm.weight
    torch.testing.assert_close(layer(x)[0], y + normed)


def test_dropout_changes_inputs_and_in_training_alone():
    torch.manual_seed(0)
    layer = MixerOnlyConfig(ATTENTION, dropout=0.25).build(C)
    for weight in layer.mixer.parameters():
        torch.nn.init.zeros_(weight)
    x = torch.ones(50, 20, C)
    assert torch.equal(layer.eval()(x)[0], x)
    y = layer.train()(x)[0]
    assert y.unique().tolist() == pytest.approx([0, 4 / 3])
    assert (y == 0).float().mean().item() == pytest.approx(0.25, abs=0.02)
    with pytest.raises(ValueError, match=r"dropout must be from 0 to below 1, got 1\.0"):
        MixerOnlyConfig(ATTENTION, dropout=1.0)


@pytest.mark.parametrize("width", [1, 3, 5])
def test_a_convolution_is_torchs(width):
    torch.manual_seed(0)
    ours = ShortConv(C, width)
    theirs = torch.nn.Conv1d(C, C, width, groups=C)
    theirs.weight.data = ours.weight.flip(0).T[:, None]
    theirs.bias.data = ours.bias.data
    x = torch.randn(2, 9, C)
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    torch.testing.assert_close(ours(x)[0], theirs(padded).transpose(1, 2))


@pytest.mark.parametrize("width", [1, 3])
def test_a_convolution_starts_as_torchs_does(width):
    torch.manual_seed(0)
    for parameter in ShortConv(1000, width).parameters():
        assert 0.98 * width**-0.5 < parameter.abs().max() <= width**-0.5


def test_positions_are_added_and_run_out():
    block = PositionsConfig(4).build(C)
    x = torch.randn(2, 4, C)
    assert torch.equal(block(x)[0], x + block.embed.weight)
    state = block(x, block.init_state(2), lengths=torch.tensor([1, 4]))[1]
    for longer in (
        lambda: block(torch.zeros(1, 5, C)),
        lambda: block(x[:, :1], state),
        lambda: block(torch.zeros(1, 6, C), cu_seqlens=torch.tensor([0, 5, 6])),
    ):
        with pytest.raises(ValueError, match="a sequence is longer than the 4 positions"):
            longer()
    one = torch.ones(1, dtype=torch.int64)
    assert block(x[:1], Seen(3 * one), lengths=one)[1].tokens.tolist() == [4]
