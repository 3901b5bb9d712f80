"""Reads and writes checkpoints of flash-linear-attention (fla-hub)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.block import MixerBlockConfig
from mezzo_core.nn.configs import BlockConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.published import Described, Layout, check_shapes, read_weights
from mezzo_core.nn.stack import BlocksConfig
from torch import Tensor

from mezzo_gsa.fla.kinds import KINDS, ONLY, Kind
from mezzo_gsa.gated_abc import GatedABCConfig
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.hgrn2_stack import HGRN2StackConfig
from mezzo_gsa.retnet import RetNetConfig

_KIND_OF = {
    GSAConfig: "gsa",
    GLAConfig: "gla",
    HGRN2Config: "hgrn2",
    RetNetConfig: "retnet",
    GatedABCConfig: "abc",
}
_OUTER = {
    "model.embeddings.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
}
_LAYER = {
    "attn_norm.weight": "mixer_norm.weight",
    "attn.o_proj.weight": "mixer.out_proj.weight",
    "mlp_norm.weight": "mlp_norm.weight",
    "mlp.gate_proj.weight": "mlp.gate.weight",
    "mlp.up_proj.weight": "mlp.up.weight",
    "mlp.down_proj.weight": "mlp.down.weight",
}
_BOUNDS = "model.lower_bounds"


def load_fla(folder: str | Path) -> tuple[LMConfig, dict[str, Tensor]]:
    """Read a GSA, GLA, HGRN2, RetNet or ABC checkpoint of flash-linear-attention.

    Args:
        folder: config.json and model.safetensors, or several files of weights beside
            model.safetensors.index.json. Nothing pickled is read.

    Returns:
        The configuration of an LM, and its `state_dict` in the stored dtype.

    Raises:
        UserError: if a file is missing or damaged, the model has what our layers lack (short
            convolutions, layers of attention, other activations, ...), or the weights are not those
            that config.json describes.
    """
    folder = Path(folder)
    told = Described.of(folder)
    name = told.kind(KINDS)
    kind = KINDS[name]
    told = Described({**kind.defaults, **told.values}, told.path)
    told.check_only(ONLY)
    has_bounds = name == "hgrn2" and told.flag("use_lower_bound", True)
    config = _read_config(told, kind, has_bounds=has_bounds)
    names = _names(kind, told.values, told.num_layers(), config.tie_embeddings)
    theirs = [part for parts in names.values() for part in parts] + [_BOUNDS] * has_bounds
    unused = ("lm_head.weight",) if config.tie_embeddings else ()
    found = read_weights(folder, theirs, unused)
    weights = {
        ours: torch.cat([found[part] for part in parts]) if len(parts) > 1 else found[parts[0]]
        for ours, parts in names.items()
    }
    if has_bounds:
        # Its bound of a layer sums the shares of layers 1 to l, ours those of 0 to l - 1.
        weights["stack.bound_logits"] = found[_BOUNDS].roll(-1, 0).flatten()
        names["stack.bound_logits"] = (_BOUNDS,)
    check_shapes(folder, config, weights, {ours: parts[0] for ours, parts in names.items()})
    if config.tie_embeddings:
        weights["head.weight"] = weights["embed.weight"]
    return config, weights


def to_fla(
    config: LMConfig, weights: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write a model as flash-linear-attention does.

    Args:
        config: of a model whose layers are all GSA, GLA, HGRN2, RetNet or gated ABC, with a SwiGLU.
        weights: its `state_dict`.

    Returns:
        The contents of config.json, and the weights by their names there.

    Raises:
        UserError: if that library has no such model; the message names what differs.
    """
    mixer, layers, mlp, norm_eps = _described(config)
    name = _KIND_OF.get(type(mixer))
    if name is None:
        raise UserError(
            f"flash-linear-attention has no {type(mixer).__name__}: the layers must be "
            + ", ".join(kind.__name__ for kind in _KIND_OF)
        )
    if mlp.kind != "swiglu":
        raise UserError(f"flash-linear-attention has MLPs of kind swiglu, got {mlp.kind}")
    kind = KINDS[name]
    values = {
        "model_type": name,
        "architectures": [f"{kind.architecture}ForCausalLM"],
        "hidden_size": config.d_model,
        "num_hidden_layers": layers,
        "intermediate_size": mlp.hidden_width(config.d_model),
        "hidden_act": "swish",
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_embeddings,
        "norm_eps": norm_eps,
        "use_short_conv": False,
    }
    own = kind.write(mixer, config.d_model)
    if own.get("norm_eps", norm_eps) != norm_eps:
        raise UserError(
            "flash-linear-attention has one norm_eps for all norms of a "
            f"{kind.architecture}: got {norm_eps} for blocks, {own['norm_eps']} for mixers"
        )
    values |= own
    if name == "hgrn2":
        values["use_lower_bound"] = isinstance(config.stack, HGRN2StackConfig)
    with torch.device("meta"):
        rows = [width for width in mixer.build(config.d_model).widths if width]
    written: dict[str, Tensor] = {}
    for ours, parts in _names(kind, values, layers, config.tie_embeddings).items():
        weight = weights[ours]
        pieces = weight.split(rows) if len(parts) > 1 else (weight,)
        written |= {part: piece.clone() for part, piece in zip(parts, pieces, strict=True)}
    if "stack.bound_logits" in weights:
        written[_BOUNDS] = weights["stack.bound_logits"].view(layers, -1).roll(1, 0)
    return values, written


def _read_config(told: Described, kind: Kind, *, has_bounds: bool) -> LMConfig:
    d_model, layers = told.count("hidden_size"), told.num_layers()
    hidden = told.count_or_none("intermediate_size")
    if hidden is None:
        hidden = 256 * -(-int(d_model * told.count("hidden_ratio") * 2 / 3) // 256)
    mlp, norm_eps = MLPConfig("swiglu", hidden=hidden), told.positive("norm_eps", 1e-6)
    vocab_size, tied = told.count("vocab_size"), told.flag("tie_word_embeddings", False)
    mixer = kind.read(told)
    try:
        if not has_bounds:
            return LMConfig(vocab_size, d_model, (mixer,) * layers, mlp, norm_eps, tied)
        stack = HGRN2StackConfig(layers, mixer, mlp, norm_eps)
        return LMConfig(vocab_size, d_model, norm_eps=norm_eps, tie_embeddings=tied, stack=stack)
    except (TypeError, ValueError) as error:
        raise UserError(f"{told.path}: {error}") from error


def _described(config: LMConfig) -> tuple[Any, int, MLPConfig, float]:
    """Return the one mixer of a model, its layers, their MLP and their epsilon."""
    stack = config.stack
    blocks: set[BlockConfig]
    if isinstance(stack, HGRN2StackConfig):
        blocks = {MixerBlockConfig(stack.mixer, stack.mlp, stack.norm_eps)}
        layers = stack.num_layers
    elif stack is None:
        blocks = {MixerBlockConfig(mixer, config.mlp, config.norm_eps) for mixer in config.mixers}
        layers = len(config.mixers)
    elif isinstance(stack, BlocksConfig):
        blocks, layers = set(stack.blocks), len(stack.blocks)
    else:
        raise UserError(f"flash-linear-attention has no {type(stack).__name__}")
    block = blocks.pop()
    if blocks:
        raise UserError("flash-linear-attention: all layers must be alike")
    if not isinstance(block, MixerBlockConfig) or block != MixerBlockConfig(
        block.mixer, block.mlp, config.norm_eps
    ):
        raise UserError(
            "flash-linear-attention: layers must be blocks with RMS norms of the last norm's "
            "norm_eps, and residuals that are not scaled"
        )
    return block.mixer, layers, block.mlp, block.norm_eps


def _names(
    kind: Kind, values: Mapping[str, Any], layers: int, tied: bool
) -> dict[str, tuple[str, ...]]:
    """Map our name of every weight to their names; ours concatenates the rows of theirs."""
    names: dict[str, tuple[str, ...]] = {
        ours: (theirs,)
        for theirs, ours in _OUTER.items()
        if not (tied and theirs == "lm_head.weight")
    }
    for i in range(layers):
        here, there = f"stack.blocks.{i}.", f"model.layers.{i}."
        names |= {here + ours: (there + theirs,) for theirs, ours in _LAYER.items()}
        names[f"{here}mixer.in_proj.weight"] = tuple(
            f"{there}attn.{part}.weight" for part in kind.projections(values)
        )
        for theirs, ours in kind.others(values).items():
            names[f"{here}mixer.{ours}"] = (f"{there}attn.{theirs}",)
    return names


LAYOUT = Layout(tuple(KINDS), load_fla, to_fla)
"""The layout for the commands `export` and `import`."""
