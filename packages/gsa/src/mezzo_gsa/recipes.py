"""Every training run of the paper, and a tiny one, as functions that return a `TrainConfig`.

A recipe's name is `<size>_<architecture>`: `tiny_gsa`, `340m_gsa_between_relu`. To make a variant
of a recipe, call `dataclasses.replace(RECIPES[name](), ...)`.

| Size    | Model                          | Trains on                           | T    |
|---------|--------------------------------|-------------------------------------|------|
| tiny    | C 128, 4 layers, 2 heads, 1.1M | embedded novels, bytes              | 512  |
| 340m    | C 1024, 24 layers, 4 heads     | 10B tokens of SlimPajama (Table 2)  | 2048 |
| 1p3b    | C 2048, 24 layers, 4 heads     | 100B tokens of SlimPajama (Table 1) | 2048 |
| 2p7b    | C 2560, 32 layers, 5 heads     | 100B tokens of SlimPajama (Table 1) | 2048 |

Learning rate, warm-up, decay, tokens, heads and slots are the paper's (appendix C.1). The paper
does not give T, the tokens of a batch and the shape of the 340M model: we take them from its
authors' GLA models of the same sizes. HGRN2 is a stack, whose layers learn their lower bounds
together. AdamW's betas, the clipping and eps are our defaults.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mezzo_core.data import DataConfig
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.recipes import AbstractHyperparameters, by_size

from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.convert.convert import TARGETS
from mezzo_gsa.convert.recipe import t2r
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import SPANS, GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.hgrn2_stack import HGRN2StackConfig
from mezzo_gsa.mamba import MambaConfig
from mezzo_gsa.retnet import RetNetConfig


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(AbstractHyperparameters):
    """The hyperparameters that all architectures of one comparison share.

    Attributes:
        num_layers: of the model.
        num_heads, num_slots: of GSA and ABC.
        key_width: K of a head in GLA and RetNet; it gives their number of heads (appendix C.1).
        hgrn2_width: of a head in HGRN2.
        attention_width: of a head in softmax attention.
    """

    num_layers: int
    num_heads: int
    num_slots: int
    key_width: int
    hgrn2_width: int
    attention_width: int

    def gsa(self, num_slots: int | None = None) -> GSAConfig:
        """Return GSA as in the paper's main models, or with another number of slots."""
        return GSAConfig(num_heads=self.num_heads, num_slots=num_slots or self.num_slots)

    def attention(self) -> AttentionConfig:
        """Return the softmax attention of Transformer++: RoPE by token."""
        return AttentionConfig(head_dim=self.attention_width)


# Each architecture is a tuple of mixers that repeats through the depth. HGRN2 has the epsilon of
# flash-linear-attention's models, so that `to_fla` can write it.
ARCHITECTURES: Mapping[str, Callable[[Hyperparameters], tuple[MixerConfig, ...]]] = {
    "gsa": lambda s: (s.gsa(),),
    "gsa_m32": lambda s: (s.gsa(32),),
    "gsa_m128": lambda s: (s.gsa(128),),
    "gsa_spread": lambda s: (replace(s.gsa(), gate_spans=SPANS),),
    "gsa_constant_decay": lambda s: (replace(s.gsa(), gate="constant"),),
    "gsa_between_none": lambda s: (replace(s.gsa(), between="none"),),
    "gsa_between_swish": lambda s: (replace(s.gsa(), between="swish"),),
    "gsa_between_relu": lambda s: (replace(s.gsa(), between="relu"),),
    "gsa_between_relu_squared": lambda s: (replace(s.gsa(), between="relu_squared"),),
    "abc": lambda s: (ABCConfig(num_heads=s.num_heads, num_slots=s.num_slots),),
    "abc_code": lambda s: (ABCConfig(s.num_heads, s.num_slots, reading="code", scaled=True),),
    "gla": lambda s: (GLAConfig(num_heads=s.d_model // (2 * s.key_width)),),
    "hgrn2": lambda s: (HGRN2Config(s.hgrn2_width, norm_eps=1e-5 * s.hgrn2_width),),
    "retnet": lambda s: (RetNetConfig(num_heads=s.d_model // s.key_width),),
    "mamba": lambda s: (MambaConfig(),),
    "attention": lambda s: (s.attention(),),
    "gsa_attention": lambda s: (s.gsa(), s.attention()),
}

PAPER_NAMES = {
    "attention": "Xfmr++",
    "retnet": "RetNet",
    "gla": "GLA",
    "hgrn2": "HGRN2",
    "gsa": "GSA",
}
"""The names of the architectures in Tables 1 and 3b."""
ABLATION = {
    "gsa": "GSA w/ 64 slots",
    "abc": "w/o decay (i.e., ABC)",
    "gsa_constant_decay": "w/ data-independent decay",
    "gsa_between_none": "- softmax",
    "gsa_between_swish": "- softmax + Swish",
    "gsa_between_relu": "- softmax + ReLU",
    "gsa_between_relu_squared": "- softmax + ReLU^2",
    "gsa_m32": "w/ 32 slots",
    "gsa_m128": "w/ 128 slots",
}
"""The names of the architectures in the rows of Table 2."""


def tiny() -> Hyperparameters:
    """About a million weights: trains in minutes on a laptop and needs no network.

    The warm-up takes a fifth of the few steps. With 16 slots the gate has 0.25 C² weights, twice
    the paper's share.
    """
    return Hyperparameters(
        vocab_size=257,
        d_model=128,
        num_layers=4,
        num_heads=2,
        num_slots=16,
        key_width=32,
        hgrn2_width=32,
        attention_width=32,
        seq_len=512,
        batch_size=8,
        steps=300,
        eval_batches=20,
        data=DataConfig(),
        optim=OptimConfig(lr=3e-3, warmup_fraction=0.2),
    )


def paper(
    *,
    d_model: int,
    num_layers: int,
    num_heads: int,
    tokens: float,
    batch_tokens: int,
    micro_batch_size: int = 8,
) -> Hyperparameters:
    """Return one of the paper's sizes; the warm-up takes 1B tokens at each."""
    seq_len = 2048
    return Hyperparameters(
        vocab_size=32_000,
        d_model=d_model,
        num_layers=num_layers,
        num_heads=num_heads,
        num_slots=64,
        key_width=256,
        hgrn2_width=128,
        attention_width=64,
        seq_len=seq_len,
        batch_size=batch_tokens // seq_len,
        micro_batch_size=micro_batch_size,
        steps=int(tokens) // batch_tokens,
        data=DataConfig(
            source="hub:cerebras/SlimPajama-627B",
            tokenizer="hub:mistralai/Mistral-7B-v0.1",
            streaming=True,
        ),
        optim=OptimConfig(lr=3e-4, min_lr=3e-5, warmup_fraction=1e9 / tokens, weight_decay=0.01),
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
        compile=True,
    )


_EVERY = tuple(name for name in ARCHITECTURES if name != "mamba")  # which has no kernel yet
_TINY = tuple(name for name in ARCHITECTURES if name not in ("gsa_m32", "gsa_m128"))
_MAIN = (*PAPER_NAMES, "gsa_m32", "gsa_m128", "gsa_attention")
SIZES: Mapping[str, tuple[Callable[[], Hyperparameters], tuple[str, ...]]] = {
    "tiny": (tiny, _TINY),
    "340m": (
        partial(
            paper,
            d_model=1024,
            num_layers=24,
            num_heads=4,
            tokens=1e10,
            batch_tokens=2**19,
            micro_batch_size=16,  # fewer gradients to add up than with 8
        ),
        _EVERY,
    ),
    "1p3b": (
        partial(paper, d_model=2048, num_layers=24, num_heads=4, tokens=1e11, batch_tokens=2**21),
        _MAIN,
    ),
    "2p7b": (
        partial(paper, d_model=2560, num_layers=32, num_heads=5, tokens=1e11, batch_tokens=2**21),
        _MAIN,
    ),
}
"""Each size with the architectures that are trained at it."""


def train_config(name: str, s: Hyperparameters, architecture: str) -> TrainConfig:
    """Return the run of one architecture with these hyperparameters."""
    mixers, feed_forward = ARCHITECTURES[architecture](s), mlp(s.d_model, architecture)
    model = LMConfig(
        vocab_size=s.vocab_size,
        d_model=s.d_model,
        mixers=tuple(mixers[i % len(mixers)] for i in range(s.num_layers)),
        mlp=feed_forward,
        tie_embeddings=False,
    )
    if isinstance(mixers[0], HGRN2Config):  # its layers learn their bounds together
        stack = HGRN2StackConfig(s.num_layers, mixers[0], feed_forward)
        model = replace(model, mixers=(), mlp=MLPConfig(), stack=stack)
    return s.run(name, model)


def mlp(d_model: int, architecture: str) -> MLPConfig:
    """Return SwiGLU, 8C/3 wide; half of that for RetNet and Mamba.

    RetNet's mixer has 8C² weights and Mamba's 7C² where the others have 4C²; so all blocks have
    about 12C². (Mamba's own models have twice the layers, and no MLP.)
    """
    if architecture not in ("retnet", "mamba"):
        return MLPConfig("swiglu")
    return MLPConfig("swiglu", hidden=256 * -(-4 * d_model // (3 * 256)))


def recipe(size: str, architecture: str) -> TrainConfig:
    """Return the run of one architecture at one size; any pair of the two tables works."""
    make, _ = SIZES[size]
    return train_config(f"{size}_{architecture}", make(), architecture)


DESCRIPTIONS = {
    "gsa": "GSA: a gated memory of slots",
    "gsa_m32": "GSA, 32 slots a head",
    "gsa_m128": "GSA, 128 slots a head",
    "gsa_spread": "GSA, gates that begin with memories of several lengths",
    "gsa_constant_decay": "GSA, a decay that does not depend on the data",
    "gsa_between_none": "GSA, no softmax over the slots",
    "gsa_between_swish": "GSA, Swish for the softmax",
    "gsa_between_relu": "GSA, ReLU for the softmax",
    "gsa_between_relu_squared": "GSA, squared ReLU for the softmax",
    "abc": "ABC: slots without a gate",
    "abc_code": "ABC as in the public code",
    "gla": "GLA: gated linear attention",
    "hgrn2": "HGRN2: a gated linear RNN with an outer-product state",
    "retnet": "RetNet: linear attention with a fixed decay",
    "mamba": "Mamba: a selective state space",
    "attention": "softmax attention (Transformer++)",
    "gsa_attention": "GSA and softmax attention in turn",
}
"""A description of each architecture, for the list of recipes."""
RECIPES, SUMMARIES = by_size(SIZES, recipe, DESCRIPTIONS)
RECIPES |= {f"t2r_{target}": partial(t2r, target) for target in TARGETS}
SUMMARIES |= {f"t2r_{x}": f"Mistral 7B, converted, fine-tuned as {x}" for x in TARGETS}
"""All recipes by name, and what each is. `t2r_*` fine-tune a converted model (section 4.2)."""
