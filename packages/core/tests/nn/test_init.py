import pytest
import torch
from mezzo_core.nn.init import init_weights
from mezzo_core.nn.lm import LMConfig
from torch import nn


@pytest.fixture
def wide(mixer_config):
    return LMConfig(vocab_size=300, d_model=128, mixers=(mixer_config,) * 2, tie_embeddings=False)


def build(config, seed):
    torch.manual_seed(seed)
    return config.build()


def test_every_matrix_is_normal_with_the_asked_deviation(wide):
    model = build(wide, 0)
    for name, weight in model.named_parameters():
        if weight.ndim == 2:
            n = weight.numel()
            # Five standard errors of the mean, of the deviation, and of the fourth moment.
            assert abs(weight.mean()) < 5 * 0.02 / n**0.5, name
            assert abs(weight.std() / 0.02 - 1) < 5 / (2 * n) ** 0.5, name
            assert abs((weight / 0.02).pow(4).mean() - 3) < 5 * (96 / n) ** 0.5, name


def test_biases_are_zero_norms_one_and_gates_as_their_mixer_says(wide):
    model = build(wide, 0)
    for module in model.modules():
        if isinstance(module, nn.RMSNorm):
            assert (module.weight == 1).all()
        if isinstance(module, nn.Linear) and module.bias is not None:
            assert (module.bias == 0).all()
    for block in model.stack.blocks:
        gain = block.mixer.gain
        assert 0.5 <= gain.min() < 0.6
        assert 1.4 < gain.max() <= 1.5


def test_a_seed_fixes_every_weight(wide):
    first, same, other = (build(wide, seed).state_dict() for seed in (3, 3, 4))
    assert all(torch.equal(first[name], same[name]) for name in first)
    drawn = [name for name in first if "norm" not in name and "bias" not in name]
    assert not any(torch.equal(first[name], other[name]) for name in drawn)


def test_init_weights_leaves_nothing_of_what_was_there(wide):
    fresh, used = build(wide, 0), build(wide, 1)
    with torch.no_grad():
        for weight in used.parameters():
            weight.fill_(7.0)
    for model in (fresh, used):
        torch.manual_seed(5)
        init_weights(model, 0.1)
    for name, weight in used.state_dict().items():
        assert torch.equal(weight, fresh.state_dict()[name]), name
    assert abs(used.embed.weight.std() / 0.1 - 1) < 0.05


@pytest.mark.parametrize("norm", [nn.LayerNorm(4), nn.GroupNorm(2, 4)])
def test_norms_are_reset_too(norm):
    nn.init.constant_(norm.weight, 5.0)
    nn.init.constant_(norm.bias, 5.0)
    init_weights(nn.Sequential(norm, nn.RMSNorm(4, elementwise_affine=False)))
    assert (norm.weight == 1).all()
    assert (norm.bias == 0).all()


def test_a_module_may_override_how_its_parts_start(wide, monkeypatch):
    kind = type(wide.build().stack.blocks[0])
    monkeypatch.setattr(kind, "init_own_weights", lambda block: block.mixer.gain.data.fill_(3.0))
    assert all((block.mixer.gain == 3).all() for block in wide.build().stack.blocks)


def test_weights_on_the_meta_device_draw_no_random_number(wide):
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with torch.device("meta"):
        wide.build()
    assert torch.equal(torch.get_rng_state(), before)
