import json
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MISTRAL = {
    **LLAMA,
    "architectures": ["MistralForCausalLM"],
    "model_type": "mistral",
    "sliding_window": 5,
    "rope_theta": 10_000.0,
}


def draw_weights(config, dtype):
    """Weights under the hub's names, large enough that every one of them shows in the logits."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return (0.3 * torch.randn(shape, generator=generator)).to(dtype)

    def norm():
        return (1 + 0.3 * torch.randn(config["hidden_size"], generator=generator)).to(dtype)

    C, F, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    D = config.get("head_dim") or C // config["num_attention_heads"]
    q, kv = (D * config[f"num_{name}_heads"] for name in ("attention", "key_value"))
    weights = {"model.embed_tokens.weight": normal(vocab, C), "model.norm.weight": norm()}
    if not config["tie_word_embeddings"]:
        weights["lm_head.weight"] = normal(vocab, C)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "input_layernorm": norm(),
            "self_attn.q_proj": normal(q, C),
            "self_attn.k_proj": normal(kv, C),
            "self_attn.v_proj": normal(kv, C),
            "self_attn.o_proj": normal(C, q),
            "post_attention_layernorm": norm(),
            "mlp.gate_proj": normal(F, C),
            "mlp.up_proj": normal(F, C),
            "mlp.down_proj": normal(C, F),
        }
        weights.update({f"model.layers.{i}.{name}.weight": w for name, w in layer.items()})
    return weights


def write_checkpoint(folder: Path, config, weights, num_files=1):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if num_files == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    files = {}
    for i in range(num_files):
        part = {name: w for j, (name, w) in enumerate(weights.items()) if j % num_files == i}
        file = f"model-{i + 1:05}-of-{num_files:05}.safetensors"
        save_file(part, folder / file)
        files.update(dict.fromkeys(part, file))
    index = {"metadata": {}, "weight_map": files}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def llama():
    """Describe a tiny Llama; keywords change it, `...` takes a key away."""
    return partial(_changed, LLAMA)


@pytest.fixture
def mistral():
    """Describe a tiny Mistral, as `llama`."""
    return partial(_changed, MISTRAL)


def _changed(base, **changes):
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


@pytest.fixture
def checkpoint(tmp_path):
    """Write a checkpoint, of random weights unless some are given; return its folder and them."""

    def write(config, weights=None, *, num_files=1, dtype=torch.float32, name="checkpoint"):
        weights = draw_weights(config, dtype) if weights is None else weights
        return write_checkpoint(tmp_path / name, config, weights, num_files), weights

    return write
