"""The baselines as models: their sizes, and needles in rows far longer than they see."""

from dataclasses import replace

import pytest
import torch
from mezzo_core.config_json import from_json, to_json
from mezzo_core.eval.evaluate import evaluate, evaluate_segments
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.generate import generate
from mezzo_drt.baselines import BlockRecurrentConfig, block_recurrent_lm, landmark_lm
from mezzo_drt.needles import PasskeyConfig
from mezzo_drt.recipes import RECIPES, SIZES, tiny
from mezzo_drt.stack import DRTConfig
from torch import nn

PAPER = SIZES["128m_pg19"]()
TINY_STACK = DRTConfig(num_layers=2, head_dim=8, hidden=24, chunk_size=4, window_size=16)
TINY = replace(tiny(), d_model=16, drt=TINY_STACK)
TINY_MODELS = {
    "base": RECIPES["tiny_base"]().model,
    "landmark": landmark_lm(TINY),
    "block recurrent": block_recurrent_lm(TINY),
}
EMBEDDING, LAYER = 50_257 * 768, 4 * 768**2 + 3 * 768 * 2048 + 2 * 768


def num_parameters(config):
    with torch.device("meta"):
        return config.build().num_parameters()


def test_models_have_the_weights_of_the_paper_s_size():
    base = EMBEDDING + 12 * LAYER + 768
    assert num_parameters(RECIPES["128m_pg19_base"]().model) == base
    assert num_parameters(landmark_lm(PAPER)) == base + 768
    # Two more queries and twice as wide an output; the states' projections, ids, start and gate.
    states = 6 * 768**2 + 768**2 + 768 + 768 + 2 * 512 * 768 + 768
    assert num_parameters(block_recurrent_lm(PAPER)) == base + 2 * 768**2 + states


def test_one_layer_is_recurrent_the_tenth_of_twelve():
    mixers = block_recurrent_lm(PAPER).mixers
    kinds = [type(mixer) for mixer in mixers]
    assert kinds == [AttentionConfig] * 9 + [BlockRecurrentConfig] + [AttentionConfig] * 2


@pytest.mark.parametrize("make", [landmark_lm, block_recurrent_lm])
def test_all_norms_have_the_epsilon_that_is_told(make):
    with torch.device("meta"):
        model = make(replace(TINY, drt=replace(TINY.drt, norm_eps=0.25))).build()
    norms = [module for module in model.modules() if isinstance(module, nn.RMSNorm)]
    assert {norm.eps for norm in norms} == {0.25}


@pytest.fixture(params=TINY_MODELS)
def model(request):
    torch.manual_seed(0)
    config = replace(TINY_MODELS[request.param], init_std=0.3)
    assert from_json(to_json(config)) == config
    return config.build()


def test_long_rows_score_in_segments_as_whole(model):
    data = PasskeyConfig(chunk_size=4, test_rows=3).build(300, None)
    whole = evaluate(model, data.validation_batches(2))
    found = evaluate_segments(model, data.test_segments(77, 2))
    assert found.loss == pytest.approx(whole.loss, rel=1e-5)
    assert (found.tokens, found.accuracy, found.exact_match) == (30, whole.accuracy, 0)


def test_generation_goes_on_as_the_whole_row_says(model):
    prompts = [[5, 6, 7] * 20, [9]]
    texts = generate(model, prompts, max_new_tokens=12)
    for prompt, text in zip(prompts, texts, strict=True):
        new = text[-12:]
        row = torch.tensor([[*prompt, *new]])
        with torch.no_grad():
            likeliest = model(row[:, :-1]).logits[0].argmax(-1).tolist()
        assert likeliest[len(prompt) - 1 :] == new
