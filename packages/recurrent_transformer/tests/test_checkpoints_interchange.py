"""A plain stack of recurrent blocks and a `RecurrentStack` load each other's checkpoints."""

import json
from dataclasses import replace

import pytest
import torch
from mezzo_core.config_json import to_json
from mezzo_core.nn import BlocksConfig, LMConfig
from mezzo_core.nn.checkpoint import copy_weights, load_model, save_model
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer import RecurrentBlockConfig, RecurrentStackConfig

BLOCK = RecurrentBlockConfig(head_dim=8, hidden=24)
STACKS = {
    "paper": RecurrentStackConfig(3, BLOCK),
    "released": RecurrentStackConfig(3, replace(BLOCK, norm="layer"), "init"),
    "no norms": RecurrentStackConfig(3, replace(BLOCK, norm="none")),
}


@pytest.fixture(params=STACKS)
def configs(request):
    """The configurations of a model with a `RecurrentStack` and of one with a plain stack."""
    fast = STACKS[request.param]
    stacks = (fast, BlocksConfig(fast.blocks()))
    return [LMConfig(37, 16, init_std=0.4, stack=stack) for stack in stacks]


@pytest.mark.parametrize("plain_first", [True, False])
def test_weights_of_one_load_into_the_other_and_compute_the_same(configs, plain_first, tmp_path):
    first, second = reversed(configs) if plain_first else configs
    torch.manual_seed(0)
    source = first.build().eval()
    save_model(source, first, tmp_path / "model")
    torch.manual_seed(1)
    target = second.build().eval()
    assert type(source.stack) is not type(target.stack)
    tokens = torch.randint(0, 37, (2, 21))
    with torch.no_grad():
        wanted = source(tokens).logits
        assert not torch.allclose(target(tokens).logits, wanted, atol=0.1)
        copy_weights(tmp_path / "model", target)
        assert_close("logits", target(tokens).logits, wanted, rtol=1e-5)
    assert list(source.state_dict()) == list(target.state_dict())


def test_changing_the_configuration_of_a_checkpoint_makes_it_fast(configs, tmp_path):
    fast, plain = configs
    torch.manual_seed(0)
    source = plain.build().eval()
    save_model(source, plain, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"config": to_json(fast)}))
    loaded, _, _ = load_model(tmp_path / "model")
    tokens = torch.randint(0, 37, (2, 21))
    with torch.no_grad():
        assert type(loaded.stack) is not type(source.stack)
        assert_close("logits", loaded(tokens).logits, source(tokens).logits, rtol=1e-5)
