"""Checkpoints of Llama and Mistral, against their equations written out here once more.

The equations: Touvron et al., arXiv:2302.13971 (pre-norm RMSNorm, SwiGLU, RoPE); RoPE as in
RoFormer, arXiv:2104.09864, with the pairs (i, i + D/2) in which the hub stores heads; grouped keys,
arXiv:2305.13245; the window of Mistral 7B, arXiv:2310.06825, section 2.
"""

import json
import math
import os
import pickle

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.llama import is_llama, llama_config
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_gsa.convert import load_llama

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 60], [0] * 12])


def rotate(x, base):
    """Turn pair (i, i + D/2) of a head at place t by t base^(-2i/D), as complex numbers."""
    T, D = x.shape[0], x.shape[-1]
    angles = torch.arange(T)[:, None] * base ** (-torch.arange(0, D, 2) / D)
    turned = torch.complex(x[..., : D // 2], x[..., D // 2 :]) * torch.polar(
        torch.ones(()).double(), angles.double()
    )
    return torch.cat([turned.real, turned.imag], -1)


def rms(x, weight, eps):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def forward(config, weights, tokens):
    """The logits of one sequence (T,), head by head and place by place, in float64."""
    w = {name: weight.double() for name, weight in weights.items()}
    HQ, H = config["num_attention_heads"], config["num_key_value_heads"]
    T, D, eps = len(tokens), config.get("head_dim", 8), config["rms_norm_eps"]
    window = config.get("sliding_window") or T
    x = w["model.embed_tokens.weight"][tokens]
    for i in range(config["num_hidden_layers"]):
        layer = {n.split(f"layers.{i}.")[1][:-7]: v for n, v in w.items() if f"layers.{i}." in n}
        y = rms(x, layer["input_layernorm"], eps)
        heads = []
        for head in range(HQ):
            mine, shared = slice(head * D, head * D + D), head // (HQ // H) * D
            shared = slice(shared, shared + D)
            q = rotate(y @ layer["self_attn.q_proj"][mine].T, config["rope_theta"])
            k = rotate(y @ layer["self_attn.k_proj"][shared].T, config["rope_theta"])
            v = y @ layer["self_attn.v_proj"][shared].T
            out = []
            for t in range(T):
                seen = slice(max(0, t - window + 1), t + 1)
                out.append((k[seen] @ q[t] / math.sqrt(D)).softmax(0) @ v[seen])
            heads.append(torch.stack(out))
        x = x + torch.cat(heads, -1) @ layer["self_attn.o_proj"].T
        y = rms(x, layer["post_attention_layernorm"], eps)
        gate = y @ layer["mlp.gate_proj"].T
        x = (
            x
            + (gate * torch.sigmoid(gate) * (y @ layer["mlp.up_proj"].T)) @ layer["mlp.down_proj"].T
        )
    x = rms(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def logits_of(folder, dtype=torch.float64):
    config, weights = load_llama(folder)
    model = config.build().to(dtype)
    model.load_state_dict({name: weight.to(dtype) for name, weight in weights.items()})
    with torch.no_grad():
        return model(TOKENS).logits


def assert_exact(folder, config, weights):
    expected = torch.stack([forward(config, weights, row) for row in TOKENS])
    assert expected.std() > 1  # logits that differ, so that agreement says something
    # RoPE's angles are float32 in our model: 12 places in, 2e-6 of an angle.
    torch.testing.assert_close(logits_of(folder), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(
        logits_of(folder, torch.float32), expected.float(), rtol=0, atol=2e-4
    )


@pytest.mark.parametrize("num_files", [1, 3])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_logits_are_llamas(llama, checkpoint, kv_heads, num_files):
    config = llama(num_key_value_heads=kv_heads)
    folder, weights = checkpoint(config, num_files=num_files)
    assert_exact(folder, config, weights)


@pytest.mark.parametrize("head_dim", [2, 16])
def test_heads_need_not_fill_the_width(mistral, checkpoint, head_dim):
    config = mistral(head_dim=head_dim)
    folder, weights = checkpoint(config)
    assert_exact(folder, config, weights)
    assert load_llama(folder)[0].mixers[0].num_heads == 4


@pytest.mark.parametrize("window", [1, 5, 40, None])
def test_a_mistral_sees_its_window_and_no_more(mistral, checkpoint, window):
    config = mistral(sliding_window=window)
    folder, weights = checkpoint(config)
    assert_exact(folder, config, weights)
    assert load_llama(folder)[0].mixers[0].window_size == window


def test_a_llama_has_no_window_whatever_it_says(llama, checkpoint):
    folder, _ = checkpoint(llama(sliding_window=4))
    assert load_llama(folder)[0].mixers[0].window_size is None


def test_a_window_that_is_no_number_is_refused(mistral, checkpoint):
    folder, _ = checkpoint(mistral(sliding_window=0))
    with pytest.raises(UserError, match="sliding_window must be a whole number of 1 or more"):
        load_llama(folder)


@pytest.mark.parametrize("stored", [True, False])
def test_a_tied_head_is_the_embedding_whether_it_is_stored_or_not(llama, checkpoint, stored):
    config = llama(tie_word_embeddings=True)
    folder, weights = checkpoint(config)
    if stored:
        again = {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}
        checkpoint(config, again)
    assert_exact(folder, config, weights)
    model, state = load_llama(folder)
    assert model.tie_embeddings
    assert state["head.weight"] is state["embed.weight"]


def test_frequencies_that_old_checkpoints_store_are_passed_over(llama, checkpoint):
    config = llama()
    folder, weights = checkpoint(config)
    old = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(4) for i in range(2)}
    checkpoint(config, {**weights, **old})
    assert_exact(folder, config, weights)


def test_the_newer_description_of_rope_is_read_too(llama, checkpoint):
    config = llama()
    newer = llama(
        rope_theta=...,
        rope_scaling=...,
        rope_parameters={"rope_type": "default", "rope_theta": 500},
    )
    folder, weights = checkpoint(config)
    checkpoint(newer, weights)
    assert_exact(folder, config, weights)


def test_a_description_becomes_ours(mistral, checkpoint):
    folder, _ = checkpoint(mistral(head_dim=8))
    assert load_llama(folder)[0] == LMConfig(
        vocab_size=61,
        d_model=32,
        mixers=(AttentionConfig(head_dim=8, num_kv_heads=2, window_size=5),) * 2,
        mlp=MLPConfig("swiglu", hidden=48),
        norm_eps=1e-5,
        tie_embeddings=False,
    )


def test_what_a_description_leaves_out_is_the_architectures_default(llama, mistral, checkpoint):
    gone = dict.fromkeys(
        ("rms_norm_eps", "rope_theta", "num_key_value_heads", "sliding_window", "head_dim"), ...
    )
    gone |= dict.fromkeys(("hidden_act", "tie_word_embeddings", "rope_scaling"), ...)
    folder, weights = checkpoint(llama(num_key_value_heads=4))
    checkpoint(llama(**gone), weights)
    config, _ = load_llama(folder)
    assert config.norm_eps == 1e-6
    assert config.mixers[0] == AttentionConfig(head_dim=8, num_kv_heads=4, rope_base=10_000.0)
    _, weights = checkpoint(mistral(num_attention_heads=8, num_key_value_heads=8))
    folder, _ = checkpoint(mistral(num_attention_heads=8, **gone), weights, name="mistral")
    mixer = load_llama(folder)[0].mixers[0]
    assert (mixer.num_kv_heads, mixer.window_size) == (8, 4096)
    qwen = llama(model_type="qwen3", architectures=..., num_attention_heads=64, **gone)
    mixer = llama_config(qwen, folder).mixers[0]
    assert (mixer.num_kv_heads, mixer.head_dim) == (32, 128)


def test_weights_keep_their_dtype(llama, checkpoint):
    folder, weights = checkpoint(llama(), dtype=torch.bfloat16)
    _, state = load_llama(folder)
    assert {weight.dtype for weight in state.values()} == {torch.bfloat16}
    name = "model.layers.1.self_attn.k_proj.weight"
    assert torch.equal(state["stack.blocks.1.mixer.wk.weight"], weights[name])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "must be llama or mistral or qwen2 or qwen3, got 'gpt2'"),
        ({"model_type": ...}, "model_type must be llama .* got None"),
        ({"model_type": "mezzo"}, "got 'mezzo': make it a run first, by import"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "default, linear or llama3.*dynamic",
        ),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "factor must be a positive.*'2'"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor must be 1 or more, got 0.5"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor must be"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "RoPE.*yarn"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "RoPE.*0.5"),
        ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": {}}, "factor must be"),
        ({"rope_scaling": "linear"}, "RoPE.*'linear'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor must be 1.0, got 0.5"),
        ({"rope_theta": "large"}, "rope_theta must be a positive number, got 'large'"),
        ({"attention_bias": True}, "attention_bias must be False, got True"),
        ({"mlp_bias": True}, "mlp_bias must be False, got True"),
        ({"use_sliding_window": True}, "use_sliding_window must be False, got True"),
        ({"hidden_act": "gelu"}, "hidden_act must be 'silu', got 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.*bits"),
        ({"head_dim": 16}, r"q_proj.weight is of shape \(32, 32\), config.json says \(64, 32\)"),
        ({"num_attention_heads": 5}, "hidden_size = 32 must be a multiple of 5 heads"),
        ({"num_key_value_heads": 3}, "num_kv_heads must divide.*got 3"),
        ({"hidden_size": "32"}, "hidden_size must be a whole number.*'32'"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads must be a whole number.*'2'"),
        ({"head_dim": 8.0}, "head_dim must be a whole number.*8.0"),
        ({"vocab_size": ...}, "vocab_size must be a whole number.*None"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be.*got 0"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps must be a positive number, got -1"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps must be a positive number, got '1e-5'"),
        ({"rope_theta": True}, "rope_theta must be a positive number, got True"),
        ({"tie_word_embeddings": "false"}, "tie_word_embeddings must be true or false.*'false'"),
        ({"architectures": 5}, "architectures must be a list, got 5"),
    ],
)
def test_a_model_that_ours_cannot_be_is_refused_in_one_line(llama, checkpoint, changes, named):
    folder, weights = checkpoint(llama())
    checkpoint(llama(**changes), weights)
    with pytest.raises(UserError, match=named) as error:
        load_llama(folder)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"model.layers.1.mlp.up_proj.weight": ...}, "lacks model.layers.1.mlp.up_proj.weight"),
        ({"lm_head.weight": ...}, "lacks lm_head.weight"),
        ({"model.layers.0.self_attn.q_proj.bias": (32,)}, "has model.layers.0.self_attn.q_proj"),
        ({"model.layers.2.input_layernorm.weight": (32,)}, "has model.layers.2.input_layernorm"),
        ({"model.norm.weight": (31,)}, r"model.norm.weight is of shape \(31,\)"),
        (
            {"model.layers.0.self_attn.k_proj.weight": (32, 32)},
            r"k_proj.weight is .*\(32, 32\), config.json says \(16, 32\)",
        ),
    ],
)
def test_weights_of_another_model_are_refused_in_one_line(llama, checkpoint, changed, named):
    folder, weights = checkpoint(llama())
    for name, shape in changed.items():
        if shape is ...:
            del weights[name]
        else:
            weights[name] = torch.zeros(shape)
    checkpoint(llama(), weights)
    with pytest.raises(UserError, match=named) as error:
        load_llama(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("wide", ["lm_head", "model.layers.0.self_attn.k_proj"])
def test_matrices_of_several_dtypes_get_the_widest(llama, checkpoint, wide):
    folder, weights = checkpoint(llama(), dtype=torch.bfloat16)
    weights[f"{wide}.weight"] = weights[f"{wide}.weight"].float()
    checkpoint(llama(), weights)
    _, state = load_llama(folder)
    assert {weight.dtype for weight in state.values() if weight.ndim == 2} == {torch.float32}
    assert state["norm.weight"].dtype == torch.bfloat16
    assert_exact(folder, llama(), weights)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.float64])
def test_whole_numbers_and_eighths_are_no_weights(llama, checkpoint, dtype):
    folder, weights = checkpoint(llama())
    weights["model.norm.weight"] = torch.ones(32).to(dtype)
    checkpoint(llama(), weights)
    with pytest.raises(UserError, match=f"model.norm.weight is {dtype}"):
        load_llama(folder)


@pytest.mark.parametrize(
    "kind",
    [{"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {"partial_rotary_factor": 0.5}],
)
def test_a_rotation_that_is_not_wanted_may_be_of_any_kind(llama, checkpoint, kind):
    folder, weights = checkpoint(llama())
    plain, expected = load_llama(folder, has_rope=False)
    checkpoint(llama(**kind), weights)
    config, found = load_llama(folder, has_rope=False)
    assert config == plain
    assert all(mixer.rope_base is None for mixer in config.mixers)
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def damage_index(folder, change):
    path = folder / "model.safetensors.index.json"
    content = json.loads(path.read_text())
    change(content["weight_map"])
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda files: files.update({"lm_head.weight": "../model.safetensors"}), "files beside it"),
        (lambda files: files.update({"lm_head.weight": 3}), "files beside it"),
        (lambda files: files.update({"lm_head.weight": "gone.safetensors"}), "gone.safetensors"),
        (
            lambda files: files.update({"lm_head.weight": files["model.norm.weight"]}),
            "lm_head.weight",
        ),
    ],
)
def test_a_damaged_index_is_one_line(llama, checkpoint, change, named):
    folder, _ = checkpoint(llama(), num_files=3)
    damage_index(folder, change)
    with pytest.raises(UserError, match=named):
        load_llama(folder)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**12}, "num_hidden_layers must be at most 10000"),
        ({"num_hidden_layers": 9_999}, "lacks model.layers.2"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"vocab_size": 10**12}, "vocab_size must be from 1 to 2.31 - 1"),
        ({"intermediate_size": 10**12}, r"config.json says \(1000000000000, 32\)"),
        ({"intermediate_size": 10**30}, "MLPConfig.hidden must be below"),
        ({"hidden_size": 2**30, "head_dim": 2**28}, "config.json says"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a positive number"),
        ({"rope_theta": 10**400}, "rope_theta must be a positive number"),
    ],
)
def test_a_description_of_impossible_sizes_takes_no_memory(llama, checkpoint, changes, named):
    folder, _ = checkpoint(llama())
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=named) as error:
        load_llama(folder)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("content", [b"[" * 100_000, b'{"a": 1' + b"0" * 9999, b"\xff", b"3"])
def test_descriptions_that_are_no_json_objects_are_one_line(llama, checkpoint, name, content):
    folder, _ = checkpoint(llama(), num_files=2)
    (folder / name).write_bytes(content)
    with pytest.raises(UserError, match=name) as error:
        load_llama(folder)
    assert "\n" not in str(error.value)


def test_a_pipe_is_not_waited_for(llama, checkpoint):
    folder, _ = checkpoint(llama(), num_files=2)
    for name in ("model-00001-of-00002.safetensors", "config.json"):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(UserError, match=name):
            load_llama(folder)


def test_damaged_and_missing_files_are_one_line(llama, checkpoint, tmp_path):
    with pytest.raises(UserError, match=r"config.json is missing"):
        load_llama(tmp_path / "nowhere")
    folder, _ = checkpoint(llama())
    (folder / "model.safetensors").write_bytes(b"no weights")
    with pytest.raises(UserError, match=r"model.safetensors cannot be read"):
        load_llama(folder)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="must hold a JSON object, got list"):
        load_llama(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match="cannot be read as JSON"):
        load_llama(folder)


def test_nothing_pickled_is_read(llama, checkpoint):
    folder, _ = checkpoint(llama())
    (folder / "model.safetensors").unlink()

    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("a pickle was read",))

    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match=r"pytorch_model.bin is pickled, which is never read"):
        load_llama(folder)


def test_the_hubs_folders_are_told_from_ours(llama, checkpoint, tmp_path):
    from mezzo_core.nn.checkpoint import save_model

    folder, _ = checkpoint(llama())
    config, _ = load_llama(folder)
    save_model(config.build(), config, tmp_path / "ours")
    assert is_llama(folder)
    assert not is_llama(tmp_path / "ours")
    assert not is_llama(tmp_path / "nowhere")


def test_a_base_of_rope_shows_in_the_logits(llama, checkpoint):
    """What the exactness above would miss, were the places too few."""
    folder, weights = checkpoint(llama())
    other, _ = checkpoint(llama(rope_theta=1e4), weights, name="other")
    assert (logits_of(folder) - logits_of(other)).abs().max() > 0.1
