"""A mixer inside models of transformers: what it writes with a cache is what it writes without."""

import pickle
from copy import deepcopy

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.hub import MezzoConfig, MezzoForCausalLM
from mezzo_core.hub.model import CACHE
from mezzo_core.hub.replace import replace_attention
from mezzo_core.nn import AttentionConfig, LMConfig
from toys.running_mean import RunningMeanConfig
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 31,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
KINDS = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
    "eager": (LlamaConfig, LlamaForCausalLM, {"attn_implementation": "eager"}),
    "mistral": (MistralConfig, MistralForCausalLM, {"sliding_window": 4}),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 8}),
}


def original(kind="llama"):
    torch.manual_seed(0)
    config, model, changes = KINDS[kind]
    return model(config(**{**SIZES, "initializer_range": 0.3, **changes})).eval()


@pytest.fixture(autouse=True)
def _toys_are_allowed(monkeypatch):
    monkeypatch.setattr(MezzoConfig, "allowed_packages", ("toys",))


MEAN, ATTENTION = RunningMeanConfig(), AttentionConfig(head_dim=8)
CASES = [
    ("llama", None, MEAN),
    ("llama", [0], MEAN),
    ("llama", None, ATTENTION),
    *((kind, [1, 2], MEAN) for kind in KINDS),
]


@pytest.mark.parametrize(("kind", "layers", "mixer"), CASES)
def test_with_a_cache_padding_and_beams_it_writes_what_it_does_without(kind, layers, mixer):
    model = replace_attention(original(kind), mixer, layers)
    prompts = [[1, 2, 3, 4, 5, 6, 7], [3, 9], [5, 5, 5, 5]]
    rows = [[0] * (7 - len(prompt)) + prompt for prompt in prompts]
    mask = torch.tensor([[0] * (7 - len(p)) + [1] * len(p) for p in prompts])
    given = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    written = model.generate(torch.tensor(rows), **given)[:, 7:]
    for prompt, row in zip(prompts, written, strict=True):
        tokens = torch.tensor([prompt])
        for _ in range(6):  # no cache, no padding
            likeliest = model(tokens, use_cache=False).logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, likeliest], 1)
        assert tokens[0, len(prompt) :].tolist() == row.tolist()
    assert len(written.unique()) > 2
    tokens, beams = torch.tensor([prompts[0]]), {"max_new_tokens": 4, "num_beams": 3}
    assert torch.equal(
        model.generate(tokens, **beams), model.generate(tokens, **beams, use_cache=False)
    )


@pytest.mark.parametrize("mixer", [MEAN, ATTENTION])
@pytest.mark.parametrize("layers", [None, [1]])
def test_packed_sequences_do_not_see_each_other(mixer, layers):
    """As `DataCollatorWithFlattening` packs them: places begin anew."""
    model, tokens = replace_attention(original(), mixer, layers), torch.randint(31, (1, 9))
    model = pickle.loads(pickle.dumps(model))
    places = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    packed = model(tokens, position_ids=places, labels=tokens).logits
    apart = [model(part, use_cache=False).logits for part in tokens.split([4, 5], 1)]
    torch.testing.assert_close(packed, torch.cat(apart, 1))
    for inner in (model.model(tokens, None, places), model.model(tokens, position_ids=places)):
        torch.testing.assert_close(model.lm_head(inner[0]), packed)
    with pytest.raises(UserError, match="packed sequences take no cache"):
        model(tokens, position_ids=places, use_cache=True)
    with pytest.raises(UserError, match="packed sequences must be in one row, got 2 rows"):
        model(tokens.expand(2, -1), position_ids=places.expand(2, -1))


def calls_of(model):
    calls = []
    model.register_forward_hook(lambda *_: calls.append(1))
    return calls


def drafting(model, num_drafted=5):
    model.generation_config.num_assistant_tokens = num_drafted
    model.generation_config.assistant_confidence_threshold = 0.0
    return model


@pytest.mark.parametrize(("kind", "layers", "mixer"), CASES)
def test_an_assistant_saves_calls_and_changes_no_token(kind, layers, mixer):
    """One that is right always, and one that is right at times: what it proposes goes back."""
    model = replace_attention(original(kind), mixer, layers)
    noisy = deepcopy(model)
    with torch.no_grad():
        for weight in noisy.parameters():
            weight.add_(torch.randn_like(weight) * 0.1 * weight.std(correction=0))
    given = {"inputs": torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), "max_new_tokens": 30}
    plain = model.generate(**given)
    assert len(plain[0, 7:].unique()) > 2
    # transformers 5.6 needs an end here, and does not stop there.
    to_end = model.generate(**given, eos_token_id=30)
    found = model.generate(**given, eos_token_id=30, prompt_lookup_num_tokens=3)
    assert torch.equal(found[:, : to_end.shape[1]], to_end)
    for assistant, most in ((deepcopy(model), 8), (noisy, 29)):
        calls = calls_of(target := deepcopy(model))
        found = target.generate(**given, assistant_model=drafting(assistant))
        assert torch.equal(found, plain)
        assert len(calls) <= most
    assert len(calls) > 8  # some of it went back


@pytest.mark.parametrize(("kind", "layers", "mixer"), CASES[:3])
def test_an_assistant_goes_on_from_the_cache_of_an_earlier_turn(kind, layers, mixer):
    model = replace_attention(original(kind), mixer, layers)
    first = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=5, return_dict_in_generate=1)
    prompt, cache = torch.cat([first.sequences, torch.tensor([[4, 5]])], 1), first[CACHE]
    given = {"assistant_model": drafting(deepcopy(model)), CACHE: cache}
    again = model.generate(prompt, max_new_tokens=8, **given)
    assert torch.equal(again, model.generate(prompt, max_new_tokens=8))
    assert cache.get_seq_length() < again.shape[1]  # it read no token twice


def test_it_assists_a_llama_and_a_model_of_ours_and_is_assisted_by_both():
    model = replace_attention(original(), MEAN, [0, 1])
    config = LMConfig(31, 32, (MEAN,) * 2, init_std=0.3)
    others = [original(), MezzoForCausalLM.around(config.build().eval(), MezzoConfig(config))]
    given = {"inputs": torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), "max_new_tokens": 12}
    for other in others:
        for target, assistant in ((model, other), (other, model)):
            found = target.generate(**given, assistant_model=drafting(assistant))
            assert torch.equal(found, target.generate(**given))


def test_it_assists_even_if_it_writes_its_token_of_padding():
    """What `generate` takes for padding then, in the prompt of the assistant."""
    model = replace_attention(original(), MEAN)
    given = {"inputs": torch.tensor([[1, 2, 3, 4, 5, 6, 7]]), "max_new_tokens": 30}
    plain = model.generate(**given)
    padding = int(plain[0, 7:].mode().values)
    assistant = drafting(replace_attention(original("tied"), MEAN))
    found = model.generate(**given, assistant_model=assistant, pad_token_id=padding)
    assert torch.equal(found, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_saved_and_read_with_its_mixers(kind, tmp_path):
    model = replace_attention(original(kind), RunningMeanConfig(), [0])
    model = replace_attention(model, AttentionConfig(head_dim=8), [2])
    model.save_pretrained(tmp_path)
    told = {"attn_implementation": model.config._attn_implementation, "output_loading_info": True}
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path, **told)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert type(loaded) is type(model)
    tokens = torch.randint(31, (2, 9))
    assert torch.equal(loaded(tokens).logits, model(tokens).logits)


def test_other_weights_are_kept_and_all_of_them_train():
    before = original()
    kept = {name: weight.clone() for name, weight in before.state_dict().items()}
    model = replace_attention(before, RunningMeanConfig(), [1])
    assert model is before  # or that one would be saved as a Llama without its mixers
    assert not any(weight.is_meta for weight in [*model.parameters(), *model.buffers()])
    assert not any(part.training for part in model.modules())
    new = model.model.layers[1].self_attn.mixer.value.weight
    assert new.std().item() == pytest.approx(model.config.initializer_range, rel=0.2)
    same = {name: weight for name, weight in model.state_dict().items() if name in kept}
    assert all(torch.equal(weight, kept[name]) for name, weight in same.items())
    assert {name for name in kept if name not in same} == {
        f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkvo"
    }
    tokens = torch.randint(31, (2, 9))
    model(tokens, labels=tokens).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters())


def test_attention_with_the_same_weights_gives_the_same_logits():
    model, tokens = original(), torch.randint(31, (2, 9))
    wanted = model(tokens).logits
    old = [layer.self_attn for layer in model.model.layers]
    model = replace_attention(model, AttentionConfig(head_dim=8, num_kv_heads=2))
    for layer, attention in zip(model.model.layers, old, strict=True):
        mixer = layer.self_attn.mixer
        for part in "qkvo":
            getattr(mixer, f"w{part}").weight = getattr(attention, f"{part}_proj").weight
    torch.testing.assert_close(model(tokens).logits, wanted, rtol=1e-4, atol=1e-4)


def test_what_its_configuration_is_told_its_layers_follow():
    model = replace_attention(replace_attention(original(), MEAN, [0]), ATTENTION, [2])
    assert model.config is model.model.config
    tokens = torch.tensor([[1, 2, 3]])
    model.config.use_cache = False
    model.config.output_hidden_states = True
    out = model(tokens)
    assert out.past_key_values is None
    assert len(out.hidden_states) == 4
    model.resize_token_embeddings(40)
    assert model.model.config.vocab_size == 40


def test_what_does_not_fit_is_one_line():
    known = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM"
    gpt2 = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1))
    for other in (gpt2, original().model, torch.nn.Linear(2, 2)):
        told = f"model must be one of {known}, got {type(other).__name__}"
        with pytest.raises(UserError, match=told):
            replace_attention(other, AttentionConfig())
    with pytest.raises(UserError, match="layers must be from 0 to 2, got 3"):
        replace_attention(original(), AttentionConfig(head_dim=8), [3])
    kept = original()
    with pytest.raises(ValueError, match="head_dim must divide d_model"):
        replace_attention(kept, AttentionConfig(head_dim=7))
    assert not hasattr(kept.config, "mezzo_mixers")
    cache = original()(torch.tensor([[1, 2]]), use_cache=True).to_tuple()[1]
    model, twin = (replace_attention(original(), AttentionConfig(head_dim=8)) for _ in range(2))
    of_twin = twin(torch.tensor([[1, 2]]), use_cache=True).to_tuple()[1]
    for other in (cache, of_twin):
        with pytest.raises(UserError, match="another model's layer in place 0"):
            model(torch.tensor([[3]]), past_key_values=other)


@pytest.mark.parametrize("layers", [None, [1]])
def test_a_static_cache_is_refused(layers):
    model = replace_attention(original(), AttentionConfig(head_dim=8), layers)
    asked = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    with pytest.raises(UserError, match="takes no static cache"):
        model.generate(torch.tensor([[1, 2]]), **asked)
