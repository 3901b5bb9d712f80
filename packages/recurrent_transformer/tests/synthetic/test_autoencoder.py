"""The autoencoder tells a row from its last token alone, and refuses what it cannot do."""

import pytest
import torch
from mezzo_core.config_json import from_json, to_json
from mezzo_core.nn import LMConfig
from mezzo_core.testing.arguments import check_fields
from mezzo_recurrent_transformer import RecurrentBlockConfig, TransformerBlockConfig
from mezzo_recurrent_transformer.synthetic.autoencoder import AutoEncoderConfig, _positions
from torch import nn

CONFIGS = [
    AutoEncoderConfig(RecurrentBlockConfig(head_dim=8, hidden=24)),
    AutoEncoderConfig(TransformerBlockConfig(head_dim=8, hidden=24)),
]


@pytest.fixture(params=CONFIGS, ids=["recurrent", "transformer"])
def stack(request):
    torch.manual_seed(0)
    stack = request.param.build(16)
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
    return stack


def test_every_place_is_told_from_the_encoder_s_last_output_alone(stack):
    x = torch.randn(2, 7, 16)
    y, state = stack(x)
    assert (y.shape, state) == (x.shape, None)
    assert not torch.allclose(y[:, 0], y[:, 1], atol=1e-3), "places differ"

    def hide(module, inputs, output):
        z, state = output
        return torch.cat([torch.full_like(z[:, :-1], torch.nan), z[:, -1:]], 1), state

    stack.encoder.register_forward_hook(hide)
    assert torch.equal(stack(x)[0], y)


def test_every_token_counts_wherever_it_stands(stack):
    x = torch.randn(1, 7, 16)
    for i in range(7):
        changed = x.clone()
        changed[:, i] += 1
        assert not torch.allclose(stack(changed)[0][:, 0], stack(x)[0][:, 0], atol=1e-3)


def test_states_and_packed_rows_are_refused(stack):
    x = torch.randn(1, 7, 16)
    with pytest.raises(ValueError, match="state must be None: an autoencoder"):
        stack.init_state(1)
    with pytest.raises(ValueError, match="state must be None: an autoencoder"):
        stack(x, ())
    with pytest.raises(ValueError, match="cu_seqlens must be None: an autoencoder"):
        stack(x, cu_seqlens=torch.tensor([0, 3, 7]))
    with torch.no_grad(), pytest.raises(ValueError, match="state must be None: an autoencoder"):
        stack.step(x[:, :1], ())


@pytest.mark.parametrize("config", CONFIGS, ids=["recurrent", "transformer"])
def test_each_field_replaced_is_named_or_gives_numbers(config):
    check_fields(config, lambda config: config.build(8)(torch.randn(1, 3, 8))[0])


def test_a_width_without_halves_is_refused():
    with pytest.raises(ValueError, match="d_model must be even, for sines and cosines, got 9"):
        AutoEncoderConfig(TransformerBlockConfig(head_dim=9)).build(9)


@pytest.mark.parametrize("config", CONFIGS, ids=["recurrent", "transformer"])
def test_a_model_with_it_is_stored_and_counts_its_weights(config):
    model = LMConfig(vocab_size=8, d_model=16, stack=config, tie_embeddings=False)
    assert from_json(to_json(model)) == model
    built = model.build()
    assert built.state_bytes(10) == 0
    decoder = 2 * 16 * 16
    assert built.stack.flops_per_token(5) == (built.stack.encoder.flops_per_token(5) + 2 * decoder)


def test_places_have_the_codes_of_the_first_transformer():
    codes = _positions(torch.zeros(2, 9, 6))
    for place in range(9):
        angles = torch.tensor([place / 10_000 ** (2 * i / 6) for i in range(3)])
        torch.testing.assert_close(codes[place], torch.cat([angles.sin(), angles.cos()]))
