"""Checkpoints of flash-linear-attention, read with the library's logits and written back."""

import json
from dataclasses import replace

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.on_meta import on_meta
from mezzo_core.testing import assert_close
from mezzo_gsa import (
    ABCConfig,
    GatedABCConfig,
    GLAConfig,
    GSAConfig,
    HGRN2Config,
    HGRN2StackConfig,
    RetNetConfig,
)
from mezzo_gsa.convert import TARGETS, convert_config
from mezzo_gsa.fla import load_fla, to_fla
from mezzo_gsa.fla.kinds import KINDS
from mezzo_gsa.recipes import recipe
from safetensors.torch import load_file, save_file

models = pytest.importorskip("fla.models", reason="flash-linear-attention is not installed")

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 19, "intermediate_size": 48}
TOKENS = torch.randint(19, (2, 13), generator=torch.Generator().manual_seed(0))
CASES = {
    "gsa": {"num_heads": 2, "num_slots": 8},
    "gsa grouped": {"num_heads": 4, "num_kv_heads": 2, "gate_logit_normalizer": 16},
    "gla": {"num_heads": 2},
    "gla relu": {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "expand_k": 1.0},
    "gla ungated": {"num_heads": 2, "use_output_gate": False, "intermediate_size": None},
    "hgrn2": {"expand_ratio": 16, "num_hidden_layers": 3},
    "hgrn2 unbounded": {"expand_ratio": 32, "use_lower_bound": False, "num_hidden_layers": 1},
    "retnet": {"num_heads": 2, "intermediate_size": None},
    "retnet relu": {"num_heads": 4, "num_kv_heads": 2, "feature_map": "relu", "norm_eps": 1e-3},
    "retnet tied": {"num_heads": 2, "use_output_gate": False, "tie_word_embeddings": True},
    "abc": {"num_heads": 2, "num_slots": 8},
    "abc bounded": {"num_heads": 4, "num_slots": None, "clamp_min": -0.5, "clamp_max": 1},
    # "exapnd" is the library's spelling.
    "abc without places": {"use_rope": False, "exapnd_k": 1.0, "exapnd_v": 2, "norm_eps": 1e-3},
}
NAMES = {
    "gsa": "GSA",
    "gla": "GLA",
    "hgrn2": "HGRN2",
    "retnet": "RetNet",
    "abc": "ABC",
    "delta": "DeltaNet",
}


def published(folder, case, **changes):
    """Let the library write a checkpoint of random weights; return its model."""
    name = NAMES[case.split()[0]]
    torch.manual_seed(0)
    settings = {**SIZES, **CASES.get(case, {}), **changes}
    model = getattr(models, f"{name}ForCausalLM")(getattr(models, f"{name}Config")(**settings))
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * (0.2 if weight.ndim > 1 else 0.5))
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def logits(config, weights):
    lm = config.build()
    lm.load_state_dict(weights)
    return lm(TOKENS).logits


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_library(case, tmp_path):
    model = published(tmp_path, case)
    with torch.no_grad():
        theirs = model(TOKENS).logits
    assert_close("logits", logits(*load_fla(tmp_path)), theirs, rtol=1e-5)
    assert theirs.std() > 0.3


@pytest.mark.parametrize("kind", KINDS)
def test_a_key_that_is_missing_has_the_value_that_the_library_gives_it(kind, tmp_path):
    published(tmp_path, f"{kind} as it is", hidden_size=128, intermediate_size=None)
    path, described = tmp_path / "config.json", load_fla(tmp_path)[0]
    told = json.loads(path.read_text())
    needed = ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    path.write_text(json.dumps({key: told[key] for key in needed}))
    assert load_fla(tmp_path)[0] == described


@pytest.mark.parametrize("case", ["gla", "retnet"])
def test_norms_that_are_not_fused_are_found_by_their_name(case, tmp_path):
    model = published(tmp_path, case, fuse_norm=False)
    found = load_fla(tmp_path)[1]["stack.blocks.1.mixer.norm.weight"]
    assert torch.equal(found, model.model.layers[1].attn.g_norm.weight)


def test_the_width_of_hgrn2s_heads_may_follow_from_their_number(tmp_path):
    published(tmp_path, "hgrn2")  # heads of 16 channels of 64
    path, described = tmp_path / "config.json", load_fla(tmp_path)[0]
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, "expand_ratio": None, "num_heads": 4}))
    assert load_fla(tmp_path)[0] == described


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_written_back_to_the_bit(case, tmp_path):
    model = published(tmp_path, case)
    values, weights = to_fla(*load_fla(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert weights.keys() == stored.keys()
    assert all(torch.equal(weights[name], stored[name]) for name in stored)
    told = model.config.to_dict()
    told["architectures"] = [type(model).__name__]
    told["intermediate_size"] = told["intermediate_size"] or 256  # as it is filled in
    if case == "abc bounded":
        told["num_slots"] = 8  # as it is filled in
    assert values == {name: told[name] for name in values}
    again = type(model)(type(model.config)(**values))
    again.load_state_dict(weights, strict=not values["tie_word_embeddings"])


@pytest.mark.parametrize(
    ("case", "changes", "words"),
    [
        ("gsa", {"use_short_conv": True}, "use_short_conv must be False, got True"),
        ("gsa", {"feature_map": "relu"}, "feature_map must be 'swish', got 'relu'"),
        ("gsa", {"exapnd_k": 0.5}, "expand_k must be 1, got 0.5"),
        ("gla", {"clamp_min": -1.0}, "clamp_min must be None, got -1.0"),
        ("gla", {"feature_map": "elu"}, "feature_map must be None, got 'elu'"),
        ("gla", {"elementwise_affine": False}, "elementwise_affine must be True, got False"),
        ("retnet", {"attn": {"layers": [1], "num_heads": 2}}, "attn must be None, got {"),
        ("gla", {"hidden_act": "powlu"}, "hidden_act must be 'swish', got 'powlu'"),
        ("abc", {"clamp_max": None}, "clamp_max must be a number, got None"),
        ("delta", {}, "model_type must be gsa or gla or hgrn2 or retnet or abc, got 'delta_net'"),
    ],
)
def test_what_our_layers_lack_is_one_line(case, changes, words, tmp_path):
    name = NAMES[case]
    settings = {**SIZES, **CASES.get(case, {}), **changes}
    getattr(models, f"{name}Config")(**settings).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=words) as raised:
        load_fla(tmp_path)
    assert "\n" not in str(raised.value)


def test_a_weight_that_does_not_fit_is_named_as_the_library_names_it(tmp_path):
    published(tmp_path, "gla")
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.attn.gk_proj.1.bias"
    for change, words in ((weights[name][1:], f"{name} is of shape"), (None, f"lacks {name}")):
        changed = {**weights, name: change}
        save_file(
            {n: w for n, w in changed.items() if w is not None}, tmp_path / "model.safetensors"
        )
        with pytest.raises(UserError, match=words):
            load_fla(tmp_path)


@pytest.mark.parametrize("value", [None, "two", 0, 2.5, 10**9, []])
@pytest.mark.parametrize("key", ["num_heads", "hidden_size", "num_hidden_layers", "vocab_size"])
def test_a_damaged_configuration_is_one_line(key, value, tmp_path):
    models.GSAConfig(**SIZES).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    told = json.loads(path.read_text())
    path.write_text(json.dumps({**told, key: value}))
    with pytest.raises(UserError) as raised:
        load_fla(tmp_path)
    assert "\n" not in str(raised.value)


SWIGLU = MLPConfig("swiglu", hidden=48)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (LMConfig(19, 64, (GSAConfig(between="relu"),), SWIGLU), "between = 'relu'.*be 'softmax'"),
        (LMConfig(19, 64, (GSAConfig(gate_spans=(2, 9)),), SWIGLU), "gate_spans"),
        (LMConfig(19, 64, (GLAConfig(gate_rank=8),), SWIGLU), "gate_rank = 8: it must be 16"),
        (LMConfig(19, 64, (GLAConfig(norm_eps=1e-5),), SWIGLU), "one norm_eps .* 1e-06 .* 1e-05"),
        (LMConfig(19, 64, (HGRN2Config(32),), SWIGLU), "norm_eps = 1e-05: it must be 0.0003"),
        (LMConfig(19, 64, (HGRN2Config(32, 0.5, 32e-5),), SWIGLU), "lower_bound = 0.5"),
        (
            LMConfig(19, 64, (RetNetConfig(norm="group"),), SWIGLU),
            "norm = 'group': it must be 'rms'",
        ),
        (LMConfig(19, 64, (GSAConfig(), RetNetConfig()), SWIGLU), "all layers must be alike"),
        (
            LMConfig(19, 64, (AttentionConfig(head_dim=16),), SWIGLU),
            "has no AttentionConfig: the layers must be GSAConfig",
        ),
        (LMConfig(19, 64, (GSAConfig(),)), "kind swiglu, got gelu"),
        (
            LMConfig(19, 64, (ABCConfig(),), SWIGLU),
            "has no ABCConfig: the layers must be .* GatedABCConfig",
        ),
        (LMConfig(19, 64, (GatedABCConfig(rope_base=5.0),), SWIGLU), "rope_base = 5.0.* 10000.0"),
    ],
)
def test_what_the_library_lacks_is_one_line(config, words):
    with pytest.raises(UserError, match=words):
        to_fla(config, config.build().state_dict())


@pytest.mark.parametrize("architecture", ["gsa", "gla", "hgrn2", "retnet"])
def test_recipes_of_its_kinds_are_written(architecture):
    """Otherwise a user would learn only after the training that the model cannot be exported."""
    config = recipe("tiny", architecture).model
    to_fla(config, on_meta(config).state_dict())


@pytest.mark.parametrize("target", ["gla", "retnet"])
def test_a_transformer_that_was_converted_is_written(target):
    """All its norms have the Transformer's epsilon, as the library wants."""
    attention = AttentionConfig(head_dim=16, rope_base=10_000.0)
    config = LMConfig(19, 64, (attention,), SWIGLU, norm_eps=1e-4)
    new_config = convert_config(config, TARGETS[target])
    to_fla(new_config, on_meta(new_config).state_dict())


def test_a_stack_of_ours_is_written(tmp_path):
    mixer = replace(HGRN2Config(16), norm_eps=16e-5)
    config = LMConfig(19, 64, stack=HGRN2StackConfig(3, mixer, SWIGLU))
    values, weights = to_fla(config, config.build().state_dict())
    models.HGRN2Config(**values).save_pretrained(tmp_path)
    save_file(weights, tmp_path / "model.safetensors")
    assert load_fla(tmp_path)[0] == config
