"""Llama, Mistral and Qwen checkpoints: reads a folder into our LM, with equal logits.

Their RoPE pairs dimension i of a head with i + D/2, as `mezzo_core.positions` does, so the rows of
queries and keys keep their order. A window of W keys includes the token itself, there as here.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.published import CONFIG, Described, check_shapes, read_weights
from mezzo_core.positions import RopeScaling

# Defaults of an architecture for keys that config.json does not have.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
}
KINDS = tuple(_DEFAULTS)
"""The architectures that `load_llama` reads, by their "model_type"."""
# The values that our LM supports for these keys; a key may be missing.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
    "use_sliding_window": (False, None),
}
_OURS = {
    "model.embed_tokens": "embed",
    "model.norm": "norm",
    "lm_head": "head",
}
_OURS_OF_A_LAYER = {
    "input_layernorm": "mixer_norm",
    "self_attn.q_proj": "mixer.wq",
    "self_attn.k_proj": "mixer.wk",
    "self_attn.v_proj": "mixer.wv",
    "self_attn.o_proj": "mixer.wo",
    "post_attention_layernorm": "mlp_norm",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
}
# The keys of each type of scaled RoPE, in the order of our fields.
_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
_QK_NORMS = {"self_attn.q_norm": "mixer.q_norm", "self_attn.k_norm": "mixer.k_norm"}


def load_llama(folder: str | Path, *, has_rope: bool = True) -> tuple[LMConfig, dict[str, Tensor]]:
    """Read a Llama, Mistral, Qwen2 or Qwen3 checkpoint in the format of the Hugging Face hub.

    Args:
        folder: config.json and model.safetensors, or several files of weights beside
            model.safetensors.index.json. Nothing pickled is read.
        has_rope: False ignores RoPE, of any kind, for a conversion to a model without RoPE.

    Returns:
        The configuration of an LM with softmax attention, and its `state_dict` in the stored dtype;
        if dtypes differ, matrices and biases get the widest. A tied head also has an entry under
        its own name.

    Raises:
        UserError: if a file is missing or damaged, the architecture is another one, the model has
            features that our LM lacks (RoPE scalings but linear and Llama 3's, other biases or
            activations, quantized weights), or the weights are not those that config.json
            describes.
    """
    folder = Path(folder)
    described = Described.of(folder)
    config = llama_config(described.values, described.path, has_rope=has_rope)
    names = _names(config)
    # Some checkpoints store a tied head twice.
    unused = ("lm_head.weight",) if config.tie_embeddings else ()
    weights = {names[name]: weight for name, weight in read_weights(folder, names, unused).items()}
    check_shapes(folder, config, weights, {ours: theirs for theirs, ours in names.items()})
    if config.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    return config, weights


def is_llama(folder: str | Path) -> bool:
    """Tell whether a folder holds a model in the hub's format, of any architecture."""
    path = Path(folder) / CONFIG
    return path.is_file() and "model_type" in read_json(path)


def local_tokenizer(folder: Path) -> str | None:
    """Return a name for `load_tokenizer` of the tokenizer beside a checkpoint; None without one."""
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    path = folder / "tokenizer.model"
    return str(path) if path.is_file() else None


def llama_config(found: Mapping[str, Any], path: Path, *, has_rope: bool = True) -> LMConfig:
    """Turn the contents of such a model's config.json, at `path`, into our configuration.

    Raises:
        UserError: if our LM does not support this model; the message names the key and its value.
    """
    kind = Described(found, path).kind(KINDS)
    found = {**_DEFAULTS[kind], **found}
    described = Described(found, path)
    described.check_only(_ONLY)
    d_model, heads = described.count("hidden_size"), described.count("num_attention_heads")
    head_dim = described.count_or_none("head_dim")
    if head_dim is None and d_model % heads:
        raise UserError(f"{path}: hidden_size = {d_model} must be a multiple of {heads} heads")
    head_dim = head_dim or d_model // heads
    rope_base, rope_scaling = _rope(described) if has_rope else (None, None)
    norm_eps = described.positive("rms_norm_eps", 1e-6)
    mixer = AttentionConfig(
        head_dim=head_dim,
        num_kv_heads=described.count_or_none("num_key_value_heads") or heads,
        # Llama's attention has no window, even if its config.json has a value.
        window_size=described.count_or_none("sliding_window") if kind == "mistral" else None,
        rope_base=rope_base,
        qkv_bias=kind == "qwen2",
        num_heads=None if head_dim * heads == d_model else heads,
        rope_scaling=rope_scaling,
    )
    if kind == "qwen3":
        mixer = replace(mixer, qk_norm="rms", norm_eps=norm_eps, norm_by_head=True)
    layers, hidden = described.num_layers(), described.count("intermediate_size")
    vocab_size, tied = described.count("vocab_size"), described.flag("tie_word_embeddings", False)
    try:
        mlp = MLPConfig("swiglu", hidden=hidden)
        return LMConfig(vocab_size, d_model, (mixer,) * layers, mlp, norm_eps, tied)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def _rope(described: Described) -> tuple[float, RopeScaling | None]:
    """Return RoPE's base and scaling.

    transformers 5 stores both in `rope_parameters`, earlier versions in `rope_theta` and
    `rope_scaling`.
    """
    found, path = described
    part = found.get("partial_rotary_factor")
    if part not in (1.0, None):
        raise UserError(f"{path}: partial_rotary_factor must be 1.0, got {part!r}")
    base, scaling = found.get("rope_theta", 10_000.0), None
    for key in ("rope_scaling", "rope_parameters"):
        parameters = found.get(key) or {}
        told = parameters if isinstance(parameters, dict) else {"rope_type": None}
        kind = told.get("rope_type", told.get("type", "default"))
        if kind not in ("default", *_SCALINGS) or told.get("partial_rotary_factor", 1.0) != 1.0:
            raise UserError(
                f"{path}: RoPE has no parts here, and is of type default, "
                f"{' or '.join(_SCALINGS)}: {key} {parameters!r}"
            )
        base = told.get("rope_theta", base)
        if kind != "default":
            numbers = (Described(told, path).positive(name, 0) for name in _SCALINGS[kind])
            try:
                scaling = RopeScaling(*numbers)
            except ValueError as error:
                raise UserError(f"{path}: {error}") from error
    return Described({"rope_theta": base}, path).positive("rope_theta", 0), scaling


def _names(config: LMConfig) -> dict[str, str]:
    """Map the hub's name of every weight to ours, without the head if it is tied."""
    names = {
        f"{theirs}.weight": f"{ours}.weight"
        for theirs, ours in _OURS.items()
        if not (config.tie_embeddings and ours == "head")
    }
    for i, mixer in enumerate(config.mixers):
        assert isinstance(mixer, AttentionConfig)
        here, there = f"stack.blocks.{i}", f"model.layers.{i}"
        parts = _OURS_OF_A_LAYER if mixer.qk_norm == "none" else _OURS_OF_A_LAYER | _QK_NORMS
        for theirs, ours in parts.items():
            names[f"{there}.{theirs}.weight"] = f"{here}.{ours}.weight"
        for part in "qkv" if mixer.qkv_bias else "":
            names[f"{there}.self_attn.{part}_proj.bias"] = f"{here}.mixer.w{part}.bias"
    return names
