"""T2R: makes the weights of GSA, GLA, RetNet and others from a Transformer's, for fine-tuning.

As in the paper's section 4.2, these are copied: embeddings, norms, MLPs, and Wq, Wk, Wv, Wo of
attention, with the heads and their groups. Other weights of a target are new: GSA's Wα, GLA's
low-rank gate, the output norms. New matrices are drawn from N(0, init_std), as in the paper's
models that start from nothing (0.02 by default). Norms start at one.

The targets follow the paper's text:

- GLA and RetNet apply ReLU to queries and keys and have no output gate, as in SUPRA. (A footnote
  explains: scores without it can be negative, which the Transformer has never seen.) They have the
  output norm, which SUPRA found critical. The keys keep the Transformer's width.
- RetNet keeps the Transformer's RoPE. GLA and GSA have none.
- GSA adds only Wα and fits because of its softmax, says the text. So the layer of section 3.3 is
  unchanged: swish on q, k and v, softmax between the passes, swish and RMSNorm on the output. It
  has no scale in place of softmax attention's D^-1/2.

A Transformer can look far back from its first step, but GSA's slots start with memories of 12
tokens. `gsa_spread`, which is not in the paper, is GSA with a bias by which they start with 2 to
2048 tokens.

`supra` (arXiv:2405.06640), with which the paper compares, is this RetNet with GroupNorm, and with a
matrix and a bias for queries and keys before ReLU. The paper merges these into the projections.

A mixer of any package is a target if it has `take_attention`; RAT has it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import check_weights
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.init import init_weights
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.on_meta import build_on_meta
from torch import Tensor

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import SPANS, GSAConfig
from mezzo_gsa.retnet import RetNetConfig


@runtime_checkable
class TakesAttention(Protocol):
    """A mixer that can start with the weights of softmax attention."""

    def take_attention(self, wq: Tensor, wk: Tensor, wv: Tensor, wo: Tensor) -> None:
        """Copy (HQ D, C), (H D, C), (H D, C) and (C, HQ D); a ValueError if they do not fit."""


MakeTarget = Callable[[AttentionConfig, LMConfig], MixerConfig]
"""Takes an attention layer and its Transformer, returns the new layer."""


def _heads(attention: AttentionConfig, model: LMConfig) -> tuple[int, float]:
    """Return the number of query heads, and the width of all in units of the model's."""
    heads = attention.num_heads or model.d_model // attention.head_dim
    return heads, heads * attention.head_dim / model.d_model


def to_gsa(attention: AttentionConfig, model: LMConfig) -> GSAConfig:
    """Return GSA in place of an attention layer."""
    heads, expand = _heads(attention, model)
    width = None if expand == 1 else attention.head_dim
    return GSAConfig(heads, attention.num_kv_heads, head_dim=width)


def to_gsa_spread(attention: AttentionConfig, model: LMConfig) -> GSAConfig:
    """Return GSA with short and long initial memories in place of an attention layer."""
    return replace(to_gsa(attention, model), gate_spans=SPANS)


def to_gla(attention: AttentionConfig, model: LMConfig) -> GLAConfig:
    """Return GLA in place of an attention layer; its norm has the epsilon of the model's."""
    heads, expand = _heads(attention, model)
    return GLAConfig(
        heads,
        attention.num_kv_heads,
        expand_k=expand,
        expand_v=expand,
        feature_map="relu",
        output_gate=False,
        norm_eps=model.norm_eps,
    )


def to_retnet(attention: AttentionConfig, model: LMConfig) -> RetNetConfig:
    """Return RetNet in place of an attention layer; its norm has the epsilon of the model's.

    Raises:
        UserError: if the layer has no RoPE.
    """
    if attention.rope_base is None:
        raise UserError("RetNet rotates queries and keys, which this attention does not: no RoPE")
    heads, expand = _heads(attention, model)
    return RetNetConfig(
        heads,
        attention.num_kv_heads,
        expand_k=expand,
        expand_v=expand,
        feature_map="relu",
        output_gate=False,
        rope_base=attention.rope_base,
        rope_scaling=attention.rope_scaling,
        norm_eps=model.norm_eps,
    )


def to_supra(attention: AttentionConfig, model: LMConfig) -> RetNetConfig:
    """Return SUPRA in place of an attention layer; errors are those of `to_retnet`."""
    return replace(to_retnet(attention, model), qk_map=True, norm="group")


TARGETS: Mapping[str, MakeTarget] = {
    "gsa": to_gsa,
    "gsa_spread": to_gsa_spread,
    "gla": to_gla,
    "retnet": to_retnet,
    "supra": to_supra,
}
"""The paper's three targets, `gsa_spread` and `supra`, by their names in commands."""
ROTATED = frozenset({"retnet", "supra"})
"""The targets that keep the Transformer's RoPE."""


def convert_config(config: LMConfig, make: MakeTarget) -> LMConfig:
    """Return the configuration of the converted Transformer.

    Args:
        config: every mixer must be softmax attention without `qk_norm` and `qkv_bias`; windows and
            ALiBi are dropped.
        make: one of `TARGETS`, or a function of yours.

    Raises:
        UserError: if a mixer is not softmax attention, or cannot be converted to this target, or
            its RoPE is scaled and the target's cannot be, or the layers are a stack.
    """
    if config.stack is not None:  # it has no mixers, and all its weights would be lost
        raise UserError(
            "only layers given as mixers are converted, a stack is not, "
            f"got {type(config.stack).__name__}"
        )
    mixers = []
    for i, mixer in enumerate(config.mixers):
        if not isinstance(mixer, AttentionConfig):
            raise UserError(
                f"only softmax attention is converted, layer {i} has {type(mixer).__name__}"
            )
        if mixer.qk_norm != "none":
            raise UserError(f"norms of queries and keys have no place to go to, layer {i} has them")
        if mixer.qkv_bias:
            raise UserError(f"biases of queries, keys and values have no place, layer {i} has them")
        made = make(mixer, config)
        if mixer.rope_scaling is not None and _rotates_plainly(made):
            raise UserError(
                f"{type(made).__name__} has plain RoPE, layer {i} a scaled one, which would be "
                "lost: give it none, or take rope_scaling from the Transformer's configuration"
            )
        mixers.append(made)
    return replace(config, mixers=tuple(mixers))


def _rotates_plainly(mixer: MixerConfig) -> bool:
    """Tell whether a mixer has an unscaled RoPE, as RAT has."""
    fields = vars(mixer)
    is_off = fields.get("rope_base") is None or fields.get("rope", "") is None
    return not is_off and fields.get("rope_scaling") is None


def convert(
    config: LMConfig, weights: Mapping[str, Tensor], make: MakeTarget, *, seed: int = 0
) -> tuple[LMConfig, dict[str, Tensor]]:
    """Turn the weights of a Transformer into those of a model of other mixers.

    Args:
        config: the Transformer.
        weights: its `state_dict`. The result shares all weights outside the mixers.
        make: one of `TARGETS`, or a function of yours.
        seed: of the new weights. torch's own generator is not changed.

    Returns:
        The new model's configuration and its `state_dict`, each layer's weights in the dtype that
        the Transformer's had.

    Raises:
        UserError: as `convert_config`; also if the weights do not fit `config`, or the new model
            cannot be built.
    """
    new_config = convert_config(config, make)
    expected = build_on_meta(config, "the Transformer").state_dict()
    check_weights("the Transformer's weights", expected, {n: w.shape for n, w in weights.items()})
    build_on_meta(new_config, "the new model")
    mixers = {f"stack.blocks.{i}.mixer.": mixer for i, mixer in enumerate(new_config.mixers)}
    kept = {name: w for name, w in weights.items() if ".mixer." not in name}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would also seed GPUs
        for prefix, mixer in mixers.items():
            old = {part: weights[f"{prefix}w{part}.weight"] for part in "qkvo"}
            for name, weight in _mixer_weights(mixer, new_config, old).items():
                kept[prefix + name] = weight
    return new_config, kept


def _mixer_weights(
    mixer: MixerConfig, config: LMConfig, old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a layer's `state_dict`: attention's four matrices in their places, the rest new."""
    built, name = mixer.build(config.d_model), type(mixer).__name__
    if not isinstance(built, TakesAttention):
        raise UserError(f"{name} cannot be made of attention: its mixer has no take_attention")
    init_weights(built, config.init_std)
    built.to(old["q"].dtype)
    try:
        built.take_attention(*(old[part] for part in "qkvo"))
    except ValueError as error:
        raise UserError(f"{name} cannot be made of this attention: it {error}") from error
    return dict(built.state_dict())
