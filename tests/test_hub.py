"""Every layer of every package in a model of transformers (`mezzo_core.hub`)."""

from copy import deepcopy
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mezzo_core.hub import MezzoConfig, MezzoForCausalLM
from mezzo_core.hub.replace import replace_attention
from mezzo_core.nn import AbstractMixer, AbstractStack, AttentionConfig, LMConfig, generate
from mezzo_core.nn.stack import BlocksConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig, RecurrentStackConfig
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
LAYERS = {
    line: f"mezzo_{path.parents[1].name}"
    for path in sorted(ROOT.glob("packages/*/tests/layers.txt"))
    for line in path.read_text().splitlines()
}
WIDTH = 64
PLAIN = LMConfig(17, WIDTH, mixers=(AttentionConfig(),), tie_embeddings=False)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [3], [5, 5, 5, 5]]


def described(line: str) -> LMConfig:
    """Return a small model of this layer: a hybrid with attention, if it is no whole stack."""
    package = import_module(LAYERS[line])
    layer = eval(line, {name: getattr(package, name) for name in package.__all__})
    with torch.device("meta"):
        built = layer.build(WIDTH)
    if isinstance(built, AbstractMixer):
        return replace(PLAIN, mixers=(layer, AttentionConfig(head_dim=8)))
    is_stack = isinstance(built, AbstractStack)
    return replace(PLAIN, mixers=(), stack=layer if is_stack else BlocksConfig((layer, layer)))


@pytest.fixture(params=LAYERS)
def model(request):
    torch.manual_seed(0)
    config = MezzoConfig(described(request.param))
    model = MezzoForCausalLM(config).eval()
    with torch.no_grad():  # so that all rows do not end in one token
        for weight in model.parameters():
            weight.mul_(5 if weight.ndim == 2 else 1)
    return model


def padded(prompts):
    """Return the prompts padded on the left, by a token that the model does not have."""
    longest = max(map(len, prompts))
    rows = [[99] * (longest - len(prompt)) + prompt for prompt in prompts]
    return {"input_ids": torch.tensor(rows), "attention_mask": (torch.tensor(rows) != 99).long()}


def test_it_is_saved_and_read_with_the_same_logits(model, tmp_path):
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.randint(17, (2, 9))
    assert torch.equal(loaded(tokens).logits, model.lm(tokens).logits)


def test_a_padded_batch_generates_what_each_prompt_does(model):
    given = padded(PROMPTS)
    new = model.generate(**given, max_new_tokens=12)[:, len(PROMPTS[0]) :]
    assert new.tolist() == generate(model.lm, PROMPTS, max_new_tokens=12)
    assert len(new.unique()) > 2


def test_beams_with_a_cache_are_those_without(model):
    given = {**padded(PROMPTS), "max_new_tokens": 8, "num_beams": 3}
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


def check_assisted(model):
    """The assistant is the model with some noise: some of its tokens are taken back."""
    assistant = deepcopy(model)
    assistant.generation_config.assistant_confidence_threshold = 0.0
    assistant.generation_config.num_assistant_tokens = 4
    with torch.no_grad():
        for weight in assistant.parameters():
            weight.add_(torch.randn_like(weight) * 0.2 * weight.std(correction=0))
    given = {"inputs": torch.tensor(PROMPTS[:1]), "max_new_tokens": 16}
    alone = model.generate(**given)
    assert torch.equal(model.generate(**given, assistant_model=assistant), alone)
    assert not torch.equal(assistant.generate(**given), alone)


def test_assisted_decoding_gives_what_the_model_alone_does(model):
    check_assisted(model)


MIXERS = [line for line in LAYERS if described(line).mixers]


@pytest.mark.parametrize("line", MIXERS)
def test_a_llama_with_its_mixer_is_assisted(line):
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "eos_token_id": None, "pad_token_id": None}
    config = LlamaConfig(vocab_size=17, **sizes, **heads, initializer_range=0.2)
    model = replace_attention(LlamaForCausalLM(config).eval(), described(line).mixers[0], [0])
    check_assisted(model)


def test_recomputed_activations_give_the_same_gradients(model):
    tokens = torch.randint(17, (2, 9))
    gradients = []
    for switch in (model.gradient_checkpointing_disable, model.gradient_checkpointing_enable):
        switch()
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        gradients.append([weight.grad.clone() for weight in model.parameters()])
    assert all(map(torch.equal, *gradients))


def test_gradients_of_each_row_may_be_taken_by_vmap(model):
    weights, tokens = dict(model.named_parameters()), torch.randint(17, (2, 6))

    def loss(weights, row):
        given = {"input_ids": row[None], "labels": row[None]}
        return torch.func.functional_call(model, weights, (), given).loss

    found = torch.vmap(torch.func.grad(loss), (None, 0))(weights, tokens)
    for i, row in enumerate(tokens):
        alone = torch.autograd.grad(loss(weights, row), weights.values())
        for name, gradient in zip(weights, alone, strict=True):
            torch.testing.assert_close(found[name][i], gradient, rtol=1e-3, atol=1e-5)


@torch.no_grad()
def test_weights_of_8_bits_give_nearly_the_same_and_generate(model):
    torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed")
    tokens = torch.randint(17, (2, 9))
    before = model(tokens).logits
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    error = (model(tokens).logits - before).square().mean() / before.square().mean()
    assert 0 < error < 0.01
    given = {"input_ids": tokens, "max_new_tokens": 6, "do_sample": False}
    assert torch.equal(model.generate(**given), model.generate(**given, use_cache=False))


def test_lora_trains_and_generates_and_is_merged(model):
    tokens = torch.arange(20).remainder(5).expand(4, -1)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    adapted = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    trained = [weight for weight in adapted.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(4):
        loss = adapted(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        assert all(weight.grad is not None for weight in trained)
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    given = {"input_ids": tokens[:, :7], "max_new_tokens": 6}
    adapted.eval()
    assert torch.equal(adapted.generate(**given), adapted.generate(**given, use_cache=False))
    logits = adapted(tokens).logits
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(merged(tokens).logits, logits, rtol=1e-3, atol=1e-3)
    assert any(not torch.equal(w, before[name]) for name, w in merged.named_parameters())


def adapted_recurrent_layers(**settings):
    config = replace(PLAIN, mixers=(), stack=RecurrentStackConfig(2, RecurrentBlockConfig(32)))
    return get_peft_model(MezzoForCausalLM(MezzoConfig(config)), LoraConfig(r=2, **settings))


def test_recurrent_layers_run_under_autocast_with_some_parts_adapted():
    with torch.autocast("cpu", torch.bfloat16):
        adapted_recurrent_layers(target_modules=["wq"])(torch.arange(9)[None])


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"lora_dropout": 0.1}, "lora_dropout must be 0"), ({"lora_bias": True}, "must have no bias")],
)
def test_recurrent_layers_refuse_adapters_that_are_no_matrix(settings, words):
    adapted = adapted_recurrent_layers(target_modules="all-linear", **settings)
    with pytest.raises(TypeError, match=words):
        adapted(torch.arange(9)[None])
