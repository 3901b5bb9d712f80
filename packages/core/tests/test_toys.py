"""Two toy papers keep the contract: a block that makes its own keys, and a stack that retrieves."""

import pytest
import torch
from mezzo_core.nn import BlocksConfig, LMConfig
from mezzo_core.nn.generate import generate
from mezzo_core.testing.arguments import check_module_arguments
from mezzo_core.testing.laws import (
    check_causal,
    check_isolated,
    check_packed,
    check_ragged,
    check_segments,
    check_state_bytes,
    check_step,
)
from toys.own_keys import OwnKeysConfig
from toys.retrieval import RetrievalConfig
from toys.running_mean import RunningMeanConfig

C = 8
PARTS = {"mixer": RunningMeanConfig(), "block": OwnKeysConfig(), "stack": RetrievalConfig()}
MODELS = {
    "mixer": {"mixers": (RunningMeanConfig(),) * 2},
    "block": {"stack": BlocksConfig((OwnKeysConfig(),) * 2)},
    "stack": {"stack": RetrievalConfig()},
}


@pytest.fixture(params=PARTS)
def part(request):
    """Build a mixer, a block or a stack, with weights large enough to matter."""
    torch.manual_seed(0)
    part = PARTS[request.param].build(C)
    part.init_own_weights()
    return part


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(0)
    return LMConfig(vocab_size=37, d_model=C, init_std=0.4, **MODELS[request.param]).build().eval()


@pytest.mark.parametrize("splits", [(19,), (4, 0, 5, 10), (1, 2, 16)])
def test_full_equals_segments_equals_steps(part, splits):
    check_segments(part, d_model=C, num_tokens=19, splits=splits)


def test_the_future_changes_nothing(part):
    check_causal(part, d_model=C, num_tokens=18)


def test_what_is_no_number_stays_where_it_is(part):
    check_isolated(part, C, 13)


@pytest.mark.parametrize("lengths", [(13, 1, 9), (0, 5, 0, 0, 12)])
def test_packed_sequences_are_as_apart(part, lengths):
    check_packed(part, C, lengths)


def test_rows_of_different_lengths_decode_as_alone(part):
    check_ragged(part, C, (0, 3, 13), 7)
    check_step(part, C, (0, 3, 13), 7)


@pytest.mark.parametrize("num_tokens", [1, 8, 15])
def test_the_state_is_as_large_as_it_says(part, num_tokens):
    check_state_bytes(part, num_tokens)


def test_arguments_replaced_are_refused_by_name(part):
    check_module_arguments(part)


def test_gradients_reach_every_weight(model):
    tokens = torch.randint(0, 37, (2, 21))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert all(weight.grad.abs().max() > 0 for weight in model.parameters())


def test_generation_continues_as_the_full_forward_would(model):
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12]]
    with torch.no_grad():
        for prompt, new in zip(prompts, generate(model, prompts, max_new_tokens=9), strict=True):
            logits = model(torch.tensor([[*prompt, *new]])).logits[0, len(prompt) - 1 : -1]
            assert logits.argmax(-1).tolist() == new
