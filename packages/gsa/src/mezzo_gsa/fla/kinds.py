"""How flash-linear-attention 0.6 describes our mixers and names their weights.

The table `KINDS` has a row for each kind of model.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mezzo_core.errors import UserError
from mezzo_core.nn.published import Described

from mezzo_gsa.gated_abc import GatedABCConfig
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.retnet import RetNetConfig

Values = Mapping[str, Any]

MODEL_EPS = 1e-5
"""Epsilon of the norm over all channels in GSA and HGRN2; config.json does not change it."""
_GATE_DAMPING, _GATE_RANK = 16.0, 16
"""Of GLA; they are not in config.json."""
_ROPE_BASE = 10_000.0
"""Of RetNet and ABC; it is not in config.json."""


@dataclass(frozen=True)
class Kind:
    """One kind of models.

    Attributes:
        architecture: the beginning of its classes' names.
        defaults: for keys that config.json does not have.
        read: makes our mixer's configuration from config.json.
        write: makes config.json's values from our mixer's configuration and d_model.
        projections: its names of the parts of our `in_proj`, in order.
        others: its names of our mixer's other weights.
    """

    architecture: str
    defaults: Values
    read: Callable[[Described], Any]
    write: Callable[[Any, int], dict[str, Any]]
    projections: Callable[[Values], tuple[str, ...]]
    others: Callable[[Values], dict[str, str]]


ONLY: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("swish",),
    "use_short_conv": (False, None),
    "elementwise_affine": (True,),
    "attn": (None,),
    "attnres_block_size": (None,),
    "quantization_config": (None,),
}
"""The values that our layers support for these keys, whatever the kind."""


def _read_gsa(told: Described) -> GSAConfig:
    told.check_only({"expand_k": (1,), "expand_v": (1,), "feature_map": ("swish",)})
    heads = told.count("num_heads")
    return GSAConfig(
        num_heads=heads,
        num_kv_heads=told.count_or_none("num_kv_heads"),
        num_slots=told.count_or_none("num_slots") or told.count("hidden_size") // heads,
        damping=told.positive("gate_logit_normalizer", 8),
        norm_eps=MODEL_EPS,
    )


def _write_gsa(mixer: GSAConfig, d_model: int) -> dict[str, Any]:
    _check(mixer, scale=1.0, gate="token", gate_spans=None, between="softmax")
    _check(mixer, feature_map="swish", output_norm=True, norm_eps=MODEL_EPS, head_dim=None)
    return {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "num_slots": mixer.num_slots,
        "gate_logit_normalizer": _whole(mixer.damping),
        "expand_k": 1,
        "expand_v": 1,
        "feature_map": "swish",
    }


def _read_gla(told: Described) -> GLAConfig:
    told.check_only({"clamp_min": (None,), "feature_map": (None, "relu")})
    told.check_only({"use_gk": (True,), "use_gv": (False,)})
    heads = _read_heads(told, expand_k=0.5, expand_v=1.0)
    return GLAConfig(**heads, gate_rank=_GATE_RANK, damping=_GATE_DAMPING)


def _write_gla(mixer: GLAConfig, d_model: int) -> dict[str, Any]:
    _check(mixer, damping=_GATE_DAMPING, gate_rank=_GATE_RANK)
    return {**_write_heads(mixer), "use_gk": True, "use_gv": False, "clamp_min": None}


def _read_retnet(told: Described) -> RetNetConfig:
    told.check_only({"feature_map": (None, "relu")})
    return RetNetConfig(**_read_heads(told, expand_k=1.0, expand_v=2.0))


def _write_retnet(mixer: RetNetConfig, d_model: int) -> dict[str, Any]:
    _check(mixer, rope_base=_ROPE_BASE, rope_scaling=None, qk_map=False, norm="rms")
    return _write_heads(mixer)


def _read_heads(told: Described, **expanded: float) -> dict[str, Any]:
    """Read what GLA and RetNet have in common; `expanded` are their usual widths."""
    return {
        "num_heads": told.count("num_heads"),
        "num_kv_heads": told.count_or_none("num_kv_heads"),
        **{name: told.positive(name, usual) for name, usual in expanded.items()},
        "feature_map": told.values.get("feature_map"),
        "output_gate": told.flag("use_output_gate", True),
        "norm_eps": told.positive("norm_eps", 1e-6),
    }


def _write_heads(mixer: GLAConfig | RetNetConfig) -> dict[str, Any]:
    return {
        "num_heads": mixer.num_heads,
        "num_kv_heads": mixer.num_kv_heads,
        "expand_k": mixer.expand_k,
        "expand_v": mixer.expand_v,
        "feature_map": mixer.feature_map,
        "use_output_gate": mixer.output_gate,
        "norm_eps": mixer.norm_eps,
    }


def _read_hgrn2(told: Described) -> HGRN2Config:
    width = told.count_or_none("expand_ratio")
    if width is None:
        width = told.count("hidden_size") // told.count("num_heads")
    # It divides queries by the root of the width, ours does not; with this epsilon the norm's
    # output is the same.
    return HGRN2Config(head_dim=width, norm_eps=MODEL_EPS * width)


def _write_hgrn2(mixer: HGRN2Config, d_model: int) -> dict[str, Any]:
    _check(mixer, norm_eps=MODEL_EPS * mixer.head_dim, lower_bound=0.0)
    return {"expand_ratio": mixer.head_dim, "num_heads": d_model // mixer.head_dim}


def _read_abc(told: Described) -> GatedABCConfig:
    slots = told.count_or_none("num_slots")
    if slots is None:
        slots = int(told.count("hidden_size") * told.positive("expand_k", 0.5))
        slots //= told.count("num_heads")
    return GatedABCConfig(
        num_heads=told.count("num_heads"),
        num_slots=slots,
        expand_k=told.positive("expand_k", 0.5),
        expand_v=told.positive("expand_v", 1.0),
        rope_base=_ROPE_BASE if told.flag("use_rope", True) else None,
        score_bounds=(told.number("clamp_min", -32), told.number("clamp_max", 32)),
        norm_eps=told.positive("norm_eps", 1e-6),
    )


def _write_abc(mixer: GatedABCConfig, d_model: int) -> dict[str, Any]:
    if mixer.rope_base is not None:
        _check(mixer, rope_base=_ROPE_BASE)
    clamp_min, clamp_max = map(_whole, mixer.score_bounds)
    return {
        "num_heads": mixer.num_heads,
        "num_slots": mixer.num_slots,
        "expand_k": mixer.expand_k,
        "expand_v": mixer.expand_v,
        "use_rope": mixer.rope_base is not None,
        "clamp_min": clamp_min,
        "clamp_max": clamp_max,
        "norm_eps": mixer.norm_eps,
    }


def _gated_norm(values: Values) -> str:
    """Return the name of each head's norm, which depends on the output gate."""
    is_fused = values.get("fuse_norm", True) and values.get("use_output_gate", True)
    return "g_norm_swish_gate.weight" if is_fused else "g_norm.weight"


def _gate(values: Values) -> tuple[str, ...]:
    return ("g_proj",) if values.get("use_output_gate", True) else ()


KINDS: Mapping[str, Kind] = {
    "gsa": Kind(
        "GSA",
        {"num_slots": 64, "gate_logit_normalizer": 8, "hidden_ratio": 4, "num_heads": 4},
        _read_gsa,
        _write_gsa,
        lambda _: ("q_proj", "k_proj", "v_proj", "f_proj"),
        lambda _: {"g_norm.weight": "norm.weight"},
    ),
    "gla": Kind(
        "GLA",
        {"hidden_ratio": 4, "num_heads": 4},
        _read_gla,
        _write_gla,
        lambda values: ("q_proj", "k_proj", "v_proj", *_gate(values), "gk_proj.0"),
        lambda values: {
            "gk_proj.1.weight": "g_proj.weight",
            "gk_proj.1.bias": "g_proj.bias",
            _gated_norm(values): "norm.weight",
        },
    ),
    "hgrn2": Kind(
        "HGRN2",
        {"expand_ratio": 128, "hidden_ratio": 4},
        _read_hgrn2,
        _write_hgrn2,
        lambda _: ("q_proj", "f_proj", "i_proj"),
        lambda _: {"g_norm.weight": "norm.weight"},
    ),
    "retnet": Kind(
        "RetNet",
        {"hidden_ratio": 2, "num_heads": 8},
        _read_retnet,
        _write_retnet,
        lambda values: ("q_proj", "k_proj", "v_proj", *_gate(values)),
        lambda values: {_gated_norm(values): "norm.weight"},
    ),
    "abc": Kind(
        "ABC",
        {"num_slots": 64, "hidden_ratio": 4, "num_heads": 4},
        _read_abc,
        _write_abc,
        lambda _: ("q_proj", "k_proj", "v_proj", "g_proj", "s_proj"),
        lambda _: {"g_norm.weight": "norm.weight"},
    ),
}
"""By "model_type" in config.json."""


def _check(mixer: Any, **wanted: Any) -> None:
    """Check that fields have the values that its layers have."""
    for name, value in wanted.items():
        if getattr(mixer, name) != value:
            raise UserError(
                f"flash-linear-attention has no {type(mixer).__name__.removesuffix('Config')} with "
                f"{name} = {getattr(mixer, name)!r}: it must be {value!r}"
            )


def _whole(number: float) -> float:
    return int(number) if number == int(number) else number
