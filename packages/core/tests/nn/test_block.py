"""A block around a mixer: its norms and its residual scale."""

import pytest
import torch
from mezzo_core.nn import Attention, AttentionConfig, LMConfig, MixerBlockConfig, MLPConfig
from mezzo_core.testing import assert_close
from mezzo_core.testing.arguments import check_module_arguments
from mezzo_core.testing.laws import LAWS
from torch import nn

C = 16
CONFIGS = {
    "plain": MixerBlockConfig(AttentionConfig(8)),
    "scaled": MixerBlockConfig(
        AttentionConfig(8, qk_norm="rms"), MLPConfig("swiglu", 24), residual_scale=0.3
    ),
    "layer norms": MixerBlockConfig(AttentionConfig(8), norm="layer", norm_eps=1e-3),
    "no norms": MixerBlockConfig(AttentionConfig(8), norm="none", residual_scale=2.0),
}


def build(name):
    torch.manual_seed(0)
    block = CONFIGS[name].build(C)
    for part in block.modules():
        if isinstance(part, nn.RMSNorm | nn.LayerNorm):
            nn.init.normal_(part.weight, mean=1.0, std=0.3)
    return block


@pytest.fixture(params=CONFIGS)
def block(request):
    return build(request.param)


@pytest.mark.parametrize("law", ["segments", "packed", "ragged", "step", "gradients", "precision"])
def test_laws_are_kept(block, law):
    LAWS[law](block)


@pytest.mark.parametrize("name", ["plain", "no norms"])
def test_arguments_replaced_are_refused_by_name(name):
    check_module_arguments(CONFIGS[name].build(C))


@pytest.mark.parametrize("name", CONFIGS)
def test_both_branches_are_scaled_and_normed(name):
    block, scale, x = build(name), CONFIGS[name].residual_scale, torch.randn(2, 9, C)
    h = x + scale * block.mixer(block.mixer_norm(x))[0]
    expected = h + scale * block.mlp(block.mlp_norm(h))
    assert_close("y", block(x)[0], expected, rtol=1e-6)


def test_norms_are_what_the_config_says():
    x = torch.randn(3, C)
    shifted = x - x.mean(-1, keepdim=True)
    expected = {
        "plain": x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt(),
        "layer norms": shifted / (shifted.square().mean(-1, keepdim=True) + 1e-3).sqrt(),
        "no norms": x,
    }
    for name, y in expected.items():
        block = CONFIGS[name].build(C)
        for norm in (block.mixer_norm, block.mlp_norm):
            assert_close(name, norm(x), y, rtol=1e-5)


def test_all_norms_of_a_model_have_its_epsilon():
    model = LMConfig(vocab_size=11, d_model=C, mixers=(AttentionConfig(8),), norm_eps=0.25).build()
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    assert [norm.eps for norm in norms] == [0.25] * 3


def test_bytes_of_mixers_on_the_host_are_told(monkeypatch):
    model = LMConfig(vocab_size=11, d_model=C, mixers=(AttentionConfig(8),) * 2).build()
    monkeypatch.setattr(Attention, "host_state_bytes", lambda _, num_tokens: 5 * num_tokens)
    assert model.host_state_bytes(7) == model.rewinding(2).host_state_bytes(7) == 70


def test_a_scale_that_is_no_positive_number_is_refused():
    with pytest.raises(ValueError, match="residual_scale must be positive and finite, got 0"):
        MixerBlockConfig(AttentionConfig(8), residual_scale=0.0)
