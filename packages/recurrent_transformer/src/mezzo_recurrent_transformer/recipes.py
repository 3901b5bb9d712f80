"""Every language model of the paper, and smaller ones, as functions that return a `TrainConfig`.

A recipe's name is `<size>_<architecture>`: `tiny_recurrent`, `300m_12_transformer`. To make a
variant of a recipe, call `dataclasses.replace(RECIPES[name](), ...)`.

| Size             | Model                                      | Trains on              | T   |
|------------------|--------------------------------------------|------------------------|-----|
| tiny             | 2 x 64                                     | embedded novels, bytes | 64  |
| small_12, _6     | 12 x 320, 6 x 448: 15M in the layers       | a text, GPT-2 tokens   | 512 |
| 150m_12, _6      | 12 x 1024, 6 x 1408                        | C4, T5 tokens          | 512 |
| 300m_24, _12, _6 | 24 x 1024 (Transformer), 12 x 1408, 6 x 2048 | C4, T5 tokens        | 512 |

The last two rows are the paper's (appendix "Hyperparameter details"). Layers x width: within a row
all models have about the same number of weights. Embedding and head are two matrices.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mezzo_core.data import DataConfig
from mezzo_core.nn import BlocksConfig
from mezzo_core.nn.configs import StackConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.recipes import AbstractHyperparameters, by_size

from mezzo_recurrent_transformer.block import RecurrentBlockConfig
from mezzo_recurrent_transformer.stack import RecurrentStackConfig, scaled
from mezzo_recurrent_transformer.transformer import TransformerBlockConfig


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(AbstractHyperparameters):
    """The hyperparameters that all architectures of one comparison share.

    `micro_batch_size` is for the Transformer alone. A recurrent layer works on one token of all its
    sequences at a time, and needs them all to be fast (section "MLPs and batch size").
    """

    num_layers: int
    head_dim: int


AnyLayer = RecurrentBlockConfig | TransformerBlockConfig
ARCHITECTURES: Mapping[str, AnyLayer] = {
    "transformer": TransformerBlockConfig(),
    "recurrent": RecurrentBlockConfig(),
    "recurrent_b8": RecurrentBlockConfig(block_size=8),
    "recurrent_b32": RecurrentBlockConfig(block_size=32),
    "recurrent_raw": RecurrentBlockConfig(persistent_norm=False),
}
"""The layer of each architecture; the size sets its head_dim.

`_b8` and `_b32` run blocks of 8 or 32 tokens at once (the paper's future work). `_raw` makes the
persistent pairs from outputs that are not normalized (appendix "RMSNorm Ablation").
"""
PAPER_NAMES = {"transformer": "Transformer", "recurrent": "Recurrent Transformer"}
"""The names of the two architectures in the paper's tables."""


def with_layers(model: str, layers: int) -> str:
    """Return the name of a model with so many layers."""
    return f"{model}, {layers} layers"


def tiny() -> Hyperparameters:
    """A tenth of a million weights: trains in a minute on a laptop and needs no network.

    T is small, as on a CPU a recurrent layer is a loop over the tokens.
    """
    return Hyperparameters(
        vocab_size=257,
        d_model=64,
        num_layers=2,
        head_dim=16,
        seq_len=64,
        batch_size=32,
        steps=200,
        data=DataConfig(),
        optim=OptimConfig(lr=5e-3, min_lr=5e-4, warmup_fraction=0.2, weight_decay=0.0),
        eval_batches=20,
    )


def small(num_layers: int, d_model: int) -> Hyperparameters:
    """15M weights in the layers: for one GPU. Learning rate and schedule are the paper's.

    Steps are many and small, so that both architectures can leave the plateau on which they predict
    little more than frequent tokens.
    """
    return Hyperparameters(
        vocab_size=50_257,
        d_model=d_model,
        num_layers=num_layers,
        head_dim=64,
        seq_len=512,
        batch_size=16,
        steps=3000,
        data=DataConfig(
            source="hub:Salesforce/wikitext:wikitext-103-raw-v1",
            tokenizer="hub:openai-community/gpt2",
        ),
        optim=OptimConfig(lr=3e-3, min_lr=3e-4, warmup_fraction=0.4, weight_decay=0.0),
        eval_every=500,
        checkpoint_every=1000,
        compile=True,
    )


def paper(num_layers: int, d_model: int, steps: int) -> Hyperparameters:
    """One of the paper's sizes (appendix "C4 pretraining experiments"): 262,144 tokens a step.

    T5's tokenizer has 32,100 tokens; the embedding has 32,128 rows, as T5's own. The learning rate
    is the best of the paper's sweep, and beta_2 its first. The cosine's end, a tenth of the peak,
    and the clipping are those of the released code.
    """
    return Hyperparameters(
        vocab_size=32_128,
        d_model=d_model,
        num_layers=num_layers,
        head_dim=64,
        seq_len=512,
        batch_size=512,
        micro_batch_size=64,
        steps=steps,
        data=DataConfig(
            source="hub:allenai/c4:en", tokenizer="hub:google-t5/t5-base", streaming=True
        ),
        optim=OptimConfig(
            lr=3e-3, min_lr=3e-4, warmup_fraction=0.4, betas=(0.9, 0.95), weight_decay=0.0
        ),
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
        compile=True,
    )


BOTH = tuple(PAPER_NAMES)
BLOCKED = ("recurrent_b8", "recurrent_b32")
SIZES: Mapping[str, tuple[Callable[[], Hyperparameters], tuple[str, ...]]] = {
    "tiny": (tiny, (*BOTH, "recurrent_b8", "recurrent_raw")),
    "small_12": (partial(small, 12, 320), (*BOTH, *BLOCKED, "recurrent_raw")),
    "small_6": (partial(small, 6, 448), (*BOTH, *BLOCKED)),
    "150m_12": (partial(paper, 12, 1024, 12_500), (*BOTH, "recurrent_raw")),
    "150m_6": (partial(paper, 6, 1408, 12_500), BOTH),
    "300m_24": (partial(paper, 24, 1024, 25_000), ("transformer",)),
    "300m_12": (partial(paper, 12, 1408, 25_000), BOTH),
    "300m_6": (partial(paper, 6, 2048, 25_000), BOTH),
}
"""Each size with the architectures that are trained at it."""


def stack(layer: AnyLayer, num_layers: int) -> StackConfig:
    """Return `num_layers` layers with the paper's residual scale, 1 / sqrt(num_layers)."""
    if isinstance(layer, RecurrentBlockConfig):
        return RecurrentStackConfig(num_layers, layer)
    return BlocksConfig(tuple(scaled(layer, num_layers, "residual")))


def train_config(name: str, s: Hyperparameters, architecture: str) -> TrainConfig:
    """Return the run of one architecture with these hyperparameters."""
    layer = replace(ARCHITECTURES[architecture], head_dim=s.head_dim)
    model = LMConfig(
        vocab_size=s.vocab_size,
        d_model=s.d_model,
        norm_eps=layer.norm_eps,
        tie_embeddings=False,
        stack=stack(layer, s.num_layers),
    )
    if isinstance(layer, RecurrentBlockConfig):  # its stack is one op, all compiled already
        s = replace(s, micro_batch_size=None, compile=False)
    return s.run(name, model)


def recipe(size: str, architecture: str) -> TrainConfig:
    """Return the run of one architecture at one size; any pair of the two tables works."""
    make, _ = SIZES[size]
    return train_config(f"{size}_{architecture}", make(), architecture)


DESCRIPTIONS = {
    "transformer": "a Transformer",
    "recurrent": "the Recurrent Transformer",
    "recurrent_b8": "the Recurrent Transformer, blocks of 8 tokens at once",
    "recurrent_b32": "the Recurrent Transformer, blocks of 32 tokens at once",
    "recurrent_raw": "the Recurrent Transformer, keys and values not normalized",
}
"""What each architecture is, for the list of recipes."""
RECIPES, SUMMARIES = by_size(SIZES, recipe, DESCRIPTIONS)
"""All recipes by name, and what each is."""
