"""Two toy papers keep the contract: a block that makes its own keys, and a stack that retrieves."""

import pytest
import torch
from mezzo_core.nn import BlocksConfig, LMConfig
from mezzo_core.nn.generate import generate
from mezzo_core.testing.arguments import check_module_arguments
from mezzo_core.testing.laws import LAWS
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


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(part, law):
    LAWS[law](part)


@pytest.mark.gpu
@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept_on_a_gpu(part, law):
    LAWS[law](part.cuda())


@pytest.mark.any_shapes
@torch.no_grad()
def test_a_step_compiles_whole(part):
    x, state = torch.randn(2, 1, C), part.reserve(part.init_state(2), 1)
    wanted = part.step(x, part.fork(state))
    torch.testing.assert_close(
        torch.compile(part.step, backend="eager", fullgraph=True)(x, state), wanted
    )


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
