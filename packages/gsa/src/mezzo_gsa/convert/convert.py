"""T2R: the weights of a Transformer made those of a GSA, GLA or RetNet model, to be fine-tuned.

What is copied (the paper's section 4.2): embeddings, norms, MLPs, and of attention Wq, Wk, Wv and
Wo, with its heads and their groups. What a target has besides is new: GSA's Wα, GLA's low-rank
gate, the output norms. New matrices are drawn from N(0, init_std), 0.02 where nothing else is
said, as all are when a model of the paper starts from nothing; norms start at one.

What the text says of the targets, and what follows from it:

- GLA and RetNet take ReLU on queries and keys and have no output gate, as in SUPRA (a footnote:
  scores of an identity map can be negative, which no Transformer has seen). Their output norm is
  what SUPRA found to be critical. The keys keep the Transformer's width.
- RetNet keeps the Transformer's rotation. GLA and GSA have none.
- Of GSA it says that Wα is all that is added, and that its softmax is why it fits. So the layer is
  that of section 3.3 unchanged: swish on q, k and v, softmax between the passes, swish and RMSNorm
  on the output; no scale stands for softmax attention's D^-1/2.

A Transformer looks far back from its first step on, but GSA's slots start with memories of 12
tokens. `gsa_spread`, which the paper does not have, is GSA with a bias that starts them with 2 to
2048.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.checkpoint import build_on_meta, check_weights
from mezzo_core.nn.contract import MixerConfig
from mezzo_core.nn.init import init_weights
from mezzo_core.nn.lm import LMConfig
from torch import Tensor

from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSA, SPANS, GSAConfig
from mezzo_gsa.retnet import RetNetConfig

Target = GSAConfig | GLAConfig | RetNetConfig
MakeTarget = Callable[[AttentionConfig, int], Target]
"""What an attention layer with so many query heads becomes."""


def to_gsa(attention: AttentionConfig, num_heads: int) -> GSAConfig:
    """Return GSA in place of an attention layer."""
    return GSAConfig(num_heads, attention.num_kv_heads)


def to_gsa_spread(attention: AttentionConfig, num_heads: int) -> GSAConfig:
    """Return GSA whose slots start with short and long memories, in place of an attention layer."""
    return replace(to_gsa(attention, num_heads), gate_spans=SPANS)


def to_gla(attention: AttentionConfig, num_heads: int) -> GLAConfig:
    """Return GLA in place of an attention layer."""
    return GLAConfig(
        num_heads, attention.num_kv_heads, expand_k=1.0, feature_map="relu", output_gate=False
    )


def to_retnet(attention: AttentionConfig, num_heads: int) -> RetNetConfig:
    """Return RetNet in place of an attention layer.

    Raises:
        UserError: if the layer has no RoPE.
    """
    if attention.rope_base is None:
        raise UserError("RetNet rotates queries and keys, which this attention does not: no RoPE")
    return RetNetConfig(
        num_heads,
        attention.num_kv_heads,
        expand_v=1.0,
        feature_map="relu",
        output_gate=False,
        rope_base=attention.rope_base,
    )


TARGETS: Mapping[str, MakeTarget] = {
    "gsa": to_gsa,
    "gsa_spread": to_gsa_spread,
    "gla": to_gla,
    "retnet": to_retnet,
}
"""The paper's three and one more, by the name that commands take."""
ROTATED = frozenset({"retnet"})
"""Those which keep the Transformer's rotation."""


def convert_config(config: LMConfig, make: MakeTarget) -> LMConfig:
    """Return the model that a Transformer becomes.

    Args:
        config: every mixer must be softmax attention; windows and ALiBi are left behind.
        make: one of `TARGETS`, or a function of yours.

    Raises:
        UserError: if a mixer is of another kind, or cannot become this target.
    """
    mixers = []
    for i, mixer in enumerate(config.mixers):
        if not isinstance(mixer, AttentionConfig):
            raise UserError(
                f"only softmax attention is converted, layer {i} has {type(mixer).__name__}"
            )
        mixers.append(make(mixer, config.d_model // mixer.head_dim))
    return replace(config, mixers=tuple(mixers))


def convert(
    config: LMConfig, weights: Mapping[str, Tensor], make: MakeTarget, *, seed: int = 0
) -> tuple[LMConfig, dict[str, Tensor]]:
    """Turn the weights of a Transformer into those of a model of GSA, GLA or RetNet.

    Args:
        config: the Transformer.
        weights: its `state_dict`; what is only copied is shared with the result.
        make: one of `TARGETS`, or a function of yours.
        seed: of the weights that are new. torch's own generator is left as it was.

    Returns:
        The new model's configuration and its `state_dict`, each layer's weights in the dtype that
        the Transformer's had.

    Raises:
        UserError: as `convert_config`, or if the weights are not those of `config`, or the new
            model cannot be built.
    """
    new_config = convert_config(config, make)
    expected = build_on_meta(config, "the Transformer").state_dict()
    check_weights("the Transformer's weights", expected, {n: w.shape for n, w in weights.items()})
    build_on_meta(new_config, "the new model")
    mixers = {f"stack.blocks.{i}.mixer.": mixer for i, mixer in enumerate(new_config.mixers)}
    kept = {name: w for name, w in weights.items() if ".mixer." not in name}
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed GPUs too
        for prefix, mixer in mixers.items():
            old = {part: weights[f"{prefix}w{part}.weight"] for part in "qkvo"}
            for name, weight in _mixer_weights(mixer, new_config, old).items():
                kept[prefix + name] = weight
    return new_config, kept


def _mixer_weights(
    mixer: MixerConfig, config: LMConfig, old: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return a layer's `state_dict`: attention's four matrices where they belong, the rest new."""
    built = mixer.build(config.d_model)
    init_weights(built, config.init_std)
    weights = {name: weight.to(old["q"].dtype) for name, weight in built.state_dict().items()}
    if isinstance(built, GSA):
        q, k, v, gates = weights["in_proj.weight"].split(built.widths)
        replaced = {"q": q, "k": k, "v": v, "o": weights["out_proj.weight"]}
        together = torch.cat([old["q"], old["k"], old["v"], gates])
        copied = {"in_proj.weight": together, "out_proj.weight": old["o"]}
    else:
        replaced = {part: weights.get(f"{part}_proj.weight") for part in old}
        copied = {f"{part}_proj.weight": weight for part, weight in old.items()}
    for part, new in replaced.items():
        if new is None or new.shape != old[part].shape:
            raise UserError(
                f"{type(mixer).__name__} has no W{part} of shape {tuple(old[part].shape)} to copy "
                "attention's weights to"
            )
    return weights | copied
