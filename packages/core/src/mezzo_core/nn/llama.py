"""Llama and Mistral checkpoints: reads a folder of safetensors into our LM, with equal logits.

Their RoPE pairs dimension i of a head with i + D/2, as `mezzo_core.positions` does. So the rows of
queries and keys are copied in the stored order. In both, a window of W keys includes the token
itself.
"""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.libraries import import_library
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.on_meta import build_on_meta

CONFIG = "config.json"
WHOLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

# Defaults of an architecture for keys that config.json does not have.
_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8, "sliding_window": 4096},
}
KINDS = tuple(_DEFAULTS)
"""The architectures that `load_llama` reads, by their "model_type"."""
# The values that our LM supports for these keys, if they are there.
_ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "quantization_config": (None,),
}
# No model has more layers. The names of all layers' weights are listed before any file is read, so
# a damaged number must not make that list huge.
_MOST_LAYERS = 10_000
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
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


def load_llama(folder: str | Path, *, has_rope: bool = True) -> tuple[LMConfig, dict[str, Tensor]]:
    """Read a Llama or Mistral checkpoint in the format of the Hugging Face hub.

    Args:
        folder: config.json and model.safetensors, or several files of weights beside
            model.safetensors.index.json. Nothing pickled is read.
        has_rope: False ignores RoPE, of any kind, for a conversion to a model without RoPE.

    Returns:
        The configuration of an LM of softmax attention, and its `state_dict` in the stored dtype;
        matrices of several dtypes all get the widest. A tied head also has an entry under its own
        name.

    Raises:
        UserError: if a file is missing or damaged, the architecture is another one, the model has
            features that our LM lacks (scaled RoPE, biases, other activations, quantized weights),
            or the weights are not those that config.json describes.
    """
    folder = Path(folder)
    path = folder / CONFIG
    config = llama_config(read_json(path), path, has_rope=has_rope)
    names = _names(len(config.mixers), config.tie_embeddings)
    weights = {
        names[name]: weight for name, weight in _read_weights(folder, names, config.tie_embeddings)
    }
    _check_weights(folder, config, names, weights)
    widest = reduce(torch.promote_types, {w.dtype for w in weights.values() if w.ndim == 2})
    weights = {name: w.to(widest) if w.ndim == 2 else w for name, w in weights.items()}
    if config.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    return config, weights


def is_llama(folder: str | Path) -> bool:
    """Tell whether a folder holds a model in the hub's format, of any architecture."""
    path = Path(folder) / CONFIG
    return path.is_file() and "model_type" in read_json(path)


def local_tokenizer(folder: Path) -> str | None:
    """Return the tokenizer beside a checkpoint, by a name for `load_tokenizer`; None if none is."""
    if (folder / "tokenizer.json").is_file():
        return str(folder)
    path = folder / "tokenizer.model"
    return str(path) if path.is_file() else None


def llama_config(found: Mapping[str, Any], path: Path, *, has_rope: bool = True) -> LMConfig:
    """Turn the hub's description of a Llama or Mistral model into ours.

    Args:
        found: the contents of its config.json.
        path: of config.json, for messages.
        has_rope: see `load_llama`.

    Raises:
        UserError: if our LM does not support this model; the message names the key and its value.
    """
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in _DEFAULTS:
        raise UserError(f"{path}: model_type must be {' or '.join(_DEFAULTS)}, got {kind!r}")
    architectures = found.get("architectures") or []
    if not isinstance(architectures, list):
        raise UserError(f"{path}: architectures must be a list, got {architectures!r}")
    for architecture in architectures:
        if not str(architecture).endswith("ForCausalLM"):
            raise UserError(f"{path}: only language models are read, got {architecture}")
    for key, allowed in _ONLY.items():
        if key in found and found[key] not in allowed:
            raise UserError(f"{path}: {key} must be {allowed[0]!r}, got {found[key]!r}")
    found = {**_DEFAULTS[kind], **found}
    d_model, heads = _count(found, path, "hidden_size"), _count(found, path, "num_attention_heads")
    head_dim = _count_or_none(found, path, "head_dim") or d_model // heads
    if head_dim * heads != d_model:
        raise UserError(
            f"{path}: {heads} heads of width {head_dim} must fill hidden_size = {d_model}"
        )
    mixer = AttentionConfig(
        head_dim=head_dim,
        num_kv_heads=_count_or_none(found, path, "num_key_value_heads") or heads,
        # Llama's attention has no window, even if its config.json has a value.
        window_size=_count_or_none(found, path, "sliding_window") if kind == "mistral" else None,
        rope_base=_rope_base(found, path) if has_rope else None,
    )
    layers = _count(found, path, "num_hidden_layers")
    if layers > _MOST_LAYERS:
        raise UserError(f"{path}: num_hidden_layers must be at most {_MOST_LAYERS}, got {layers}")
    tied = found.get("tie_word_embeddings", False)
    if type(tied) is not bool:
        raise UserError(f"{path}: tie_word_embeddings must be true or false, got {tied!r}")
    norm_eps = _positive(found.get("rms_norm_eps", 1e-6), path, "rms_norm_eps")
    try:
        return LMConfig(
            vocab_size=_count(found, path, "vocab_size"),
            d_model=d_model,
            mixers=(mixer,) * layers,
            mlp=MLPConfig("swiglu", hidden=_count(found, path, "intermediate_size")),
            norm_eps=norm_eps,
            tie_embeddings=tied,
        )
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: {error}") from error


def _count(found: Mapping[str, Any], path: Path, key: str) -> int:
    value = found.get(key)
    if type(value) is not int or value < 1:
        raise UserError(f"{path}: {key} must be a whole number of 1 or more, got {value!r}")
    return value


def _count_or_none(found: Mapping[str, Any], path: Path, key: str) -> int | None:
    return None if found.get(key) is None else _count(found, path, key)


def _positive(value: Any, path: Path, key: str) -> float:
    if type(value) not in (int, float) or not 0 < value < sys.float_info.max:
        raise UserError(f"{path}: {key} must be a positive number, got {value!r}")
    return float(value)


def _rope_base(found: Mapping[str, Any], path: Path) -> float:
    """Return RoPE's base, from `rope_parameters` (transformers 5) or `rope_theta` (before)."""
    part = found.get("partial_rotary_factor")
    if part not in (1.0, None):
        raise UserError(f"{path}: partial_rotary_factor must be 1.0, got {part!r}")
    base = found.get("rope_theta", 10_000.0)
    for key in ("rope_scaling", "rope_parameters"):
        parameters = found.get(key) or {}
        is_plain = isinstance(parameters, dict) and (
            parameters.get("rope_type", parameters.get("type", "default")) == "default"
            and parameters.get("partial_rotary_factor", 1.0) == 1.0
        )
        if not is_plain:
            raise UserError(
                f"{path}: RoPE has neither scaling nor parts here: {key} {parameters!r}"
            )
        base = parameters.get("rope_theta", base)
    return _positive(base, path, "rope_theta")


def _names(num_layers: int, tied: bool) -> dict[str, str]:
    """Map the hub's name of every weight to ours, without the head if it is tied."""
    names = {
        f"{theirs}.weight": f"{ours}.weight"
        for theirs, ours in _OURS.items()
        if not (tied and ours == "head")
    }
    for i in range(num_layers):
        for theirs, ours in _OURS_OF_A_LAYER.items():
            names[f"model.layers.{i}.{theirs}.weight"] = f"stack.blocks.{i}.{ours}.weight"
    return names


def _read_weights(
    folder: Path, names: Mapping[str, str], tied: bool
) -> Iterator[tuple[str, Tensor]]:
    """Yield every weight that `names` lists, by the hub's name, file by file."""
    files = _files(folder)
    missing = [name for name in names if name not in files]
    # Old checkpoints also store RoPE's frequencies, and some store a tied head twice.
    known = {*names, "lm_head.weight"} if tied else set(names)
    unknown = [
        name for name in files if name not in known and not name.endswith(".rotary_emb.inv_freq")
    ]
    if missing or unknown:
        what = f"lacks {missing[0]}" if missing else f"has {unknown[0]}"
        more = len(missing) + len(unknown) - 1
        raise UserError(
            f"{folder} {what}{f' and {more} more problems' if more else ''}: these are not the "
            f"weights of the model that {CONFIG} describes"
        )
    for file in dict.fromkeys(files.values()):
        with _opened(folder / file) as stored:
            for name in (name for name in names if files[name] == file):
                yield name, stored.get_tensor(name)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """Open a file of weights; errors become a UserError of one line."""
    library = import_library("safetensors", "train")
    if not path.is_file():  # on a pipe the library would wait forever
        raise UserError(f"{path} cannot be read: it is missing, or no file")
    try:
        with library.safe_open(path, framework="pt") as stored:
            yield stored
    except (OSError, library.SafetensorError) as error:
        raise UserError(f"{path} cannot be read: {error}") from error


def _files(folder: Path) -> dict[str, str]:
    """Return the file of every weight."""
    if (folder / INDEX).is_file():
        files = read_json(folder / INDEX).get("weight_map")
        if not isinstance(files, dict) or not all(
            isinstance(file, str) and Path(file).name == file for file in files.values()
        ):
            raise UserError(f"{folder / INDEX}: weight_map must name files beside it")
        return files
    if (folder / WHOLE).is_file():
        with _opened(folder / WHOLE) as stored:
            return dict.fromkeys(stored.keys(), WHOLE)
    pickled = sorted(path.name for path in folder.glob("*.bin"))
    instead = f"; {pickled[0]} is pickled, which is never read" if pickled else ""
    raise UserError(f"{folder} has neither {WHOLE} nor {INDEX}{instead}")


def _check_weights(
    folder: Path, config: LMConfig, names: Mapping[str, str], weights: Mapping[str, Tensor]
) -> None:
    expected = build_on_meta(config, folder / CONFIG).state_dict()
    for theirs, ours in names.items():
        found, wanted = weights[ours], expected[ours]
        if found.dtype not in _DTYPES:
            allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
            raise UserError(f"{folder}: {theirs} is {found.dtype}; supported: {allowed}")
        if found.shape != wanted.shape:
            raise UserError(
                f"{folder}: {theirs} is of shape {tuple(found.shape)}, {CONFIG} says "
                f"{tuple(wanted.shape)}"
            )
