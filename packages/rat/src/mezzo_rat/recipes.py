"""Every training run of the paper, and smaller ones, as functions that return a `TrainConfig`.

A recipe's name is `<size>_<architecture>`: `tiny_rat_l16`, `1p3b_attention_swa`. To make a variant
of a recipe, call `dataclasses.replace(RECIPES[name](), ...)`.

| Size            | Model                    | Trains on                  | T         |
|-----------------|--------------------------|----------------------------|-----------|
| tiny            | C 128, 4 layers, 0.9M    | embedded novels, bytes     | 512       |
| small           | C 384, 12 layers, 41M    | WikiText-103, GPT-2 tokens | 1024      |
| mid             | C 640, 12 layers, 92M    | WikiText-103, GPT-2 tokens | 1024      |
| 200m, _16k, _32k| C 1024, 12 layers, 203M  | PG19, GPT-2 tokens         | 8K to 32K |
| 1p3b, 1p3b_16k  | C 2048, 24 layers, 1.28B | FineWeb-Edu, LLaMA-2 tokens| 4K, 16K   |

The last two rows are the paper's (appendix A.2, tables 9 and 11).
Sliding windows have 1024 tokens at the paper's sizes. At the three others the window is T / 4, the
paper's ratio at 4K: a window of 1024 would be full attention there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mezzo_core.data import DataConfig
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.recipes import AbstractHyperparameters, by_size

from mezzo_rat.linear_rnn import LinearRNNConfig
from mezzo_rat.mixer import RATConfig
from mezzo_rat.reversed import RATReversedConfig


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(AbstractHyperparameters):
    """The hyperparameters that all architectures of one comparison share."""

    num_layers: int
    head_dim: int
    window_size: int
    rope_base: float = 10_000.0

    def attention(self, *, window: bool = False, rope: bool = True) -> AttentionConfig:
        """Return softmax attention, full or over a window, with RoPE by token or without."""
        return AttentionConfig(
            head_dim=self.head_dim,
            window_size=self.window_size if window else None,
            rope_base=self.rope_base if rope else None,
        )

    def rat(self, chunk_size: int) -> RATConfig:
        """Return RAT as in the paper's main models."""
        return RATConfig(chunk_size, head_dim=self.head_dim, rope_base=self.rope_base)

    def reversed(self, num_chunks: int) -> RATReversedConfig:
        """Return RAT-Reversed with this number of chunks, which Table 9 calls C."""
        return RATReversedConfig(
            chunk_size=self.seq_len // num_chunks,
            head_dim=self.head_dim,
            gate_rank=self.head_dim,
            rope_base=self.rope_base,
            span=num_chunks,
        )


SHORT_RUN = 0.2
"""Warm-up as a fraction of all steps, at the sizes that are not the paper's.

Runs of a few hundred steps need more than the paper's 5 to 10 %. With less, attention overshoots
most of all, and the comparison would be unfair to it.
"""

# Each architecture is a tuple of mixers that repeats through the depth, so two mixers alternate
# (section 3.1). In the ablation of Fig. 4a, full queries and keys need more weights, and gates of
# rank D save as many: with G = 2 groups both are equal (2 D C = G D C). Three are not the paper's:
# "span16" starts with memories as short as those of RAT with L = 16, and ALiBi lets attention start
# with a preference for near tokens.
ARCHITECTURES: Mapping[str, Callable[[Hyperparameters], tuple[MixerConfig, ...]]] = {
    "rnn": lambda s: (LinearRNNConfig(span=s.seq_len),),
    "rnn_span16": lambda s: (LinearRNNConfig(span=16),),
    "rat_l16": lambda s: (s.rat(16),),
    "rat_l64": lambda s: (s.rat(64),),
    "rat_l64_span16": lambda s: (replace(s.rat(64), span=16),),
    "rat_l128": lambda s: (s.rat(128),),
    "rat_l256": lambda s: (s.rat(256),),
    "attention": lambda s: (s.attention(),),
    "attention_alibi": lambda s: (replace(s.attention(rope=False), alibi="press"),),
    "attention_swa": lambda s: (s.attention(), s.attention(window=True)),
    "rat_swa": lambda s: (s.rat(16), s.attention(window=True)),
    "attention_swa_nope": lambda s: (s.attention(rope=False), s.attention(window=True)),
    "rat_swa_nope": lambda s: (replace(s.rat(16), rope=None), s.attention(window=True)),
    "rat_l64_full_qk": lambda s: (replace(s.rat(64), num_groups=None, gate_rank=s.head_dim),),
    "rat_l64_token_rope": lambda s: (replace(s.rat(64), rope="token"),),
    "reversed_c16": lambda s: (s.reversed(16),),
    "reversed_c64": lambda s: (s.reversed(64),),
    "reversed_c128": lambda s: (s.reversed(128),),
}

PAPER_NAMES = {
    "rnn": "RNN",
    "rat_l64": "RAT(L=64)",
    "rat_l16": "RAT(L=16)",
    "attention": "Attention",
    "attention_swa": "Attention-SWA",
    "rat_swa": "RAT(L=16)-SWA",
}
"""The architectures of the main comparison, with their names in the paper's tables."""
SIX = tuple(PAPER_NAMES)


def tiny() -> Hyperparameters:
    """About a million weights: trains in minutes on a laptop and needs no network."""
    return Hyperparameters(
        vocab_size=257,
        d_model=128,
        num_layers=4,
        head_dim=32,
        seq_len=512,
        window_size=128,
        data=DataConfig(),
        optim=OptimConfig(lr=3e-3, warmup_fraction=SHORT_RUN),
        batch_size=8,
        steps=300,
        eval_batches=20,
    )


def small() -> Hyperparameters:
    """21M weights in the blocks and 19M in the embedding: for one GPU."""
    return Hyperparameters(
        vocab_size=50_257,
        d_model=384,
        num_layers=12,
        head_dim=64,
        seq_len=1024,
        window_size=256,
        data=DataConfig(
            source="hub:Salesforce/wikitext:wikitext-103-raw-v1",
            tokenizer="hub:openai-community/gpt2",
        ),
        optim=OptimConfig(lr=1.5e-3, warmup_fraction=SHORT_RUN),
        batch_size=64,
        micro_batch_size=16,
        steps=2000,
        eval_every=200,
        checkpoint_every=500,
    )


def mid() -> Hyperparameters:
    """59M weights in the blocks and 32M in the embedding: for one GPU."""
    return replace(small(), d_model=640, optim=OptimConfig(lr=1e-3, warmup_fraction=SHORT_RUN))


def paper_200m(seq_len: int) -> Hyperparameters:
    """The 200M models (appendix A.2): 15B tokens of PG19, 1M a step; the paper has three T."""
    tokens = 2**20
    return Hyperparameters(
        vocab_size=50_257,
        d_model=1024,
        num_layers=12,
        head_dim=64,
        seq_len=seq_len,
        window_size=1024,
        data=DataConfig(source="hub:emozilla/pg19", tokenizer="hub:openai-community/gpt2"),
        optim=OptimConfig(lr=6e-4, warmup_fraction=0.1, betas=(0.9, 0.98)),
        batch_size=tokens // seq_len,
        micro_batch_size=max(1, 2**15 // seq_len),
        steps=15_000_000_000 // tokens,
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
        compile=True,
    )


def paper_1p3b(seq_len: int, rope_base: float) -> Hyperparameters:
    """The 1.3B models (appendix A.2): 100B tokens of FineWeb-Edu, 2M a step.

    The text does not give AdamW's betas; these are the released code's.
    """
    tokens = 2**21
    return Hyperparameters(
        vocab_size=32_000,
        d_model=2048,
        num_layers=24,
        head_dim=128,
        seq_len=seq_len,
        window_size=1024,
        data=DataConfig(
            source="hub:HuggingFaceFW/fineweb-edu:sample-100BT",
            tokenizer="hub:NousResearch/Llama-2-7b-hf",
            streaming=True,
        ),
        optim=OptimConfig(lr=8e-4, warmup_fraction=0.05, betas=(0.9, 0.95)),
        batch_size=tokens // seq_len,
        micro_batch_size=max(1, 2**14 // seq_len),
        steps=100_000_000_000 // tokens,
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
        rope_base=rope_base,
        compile=True,
    )


_200M = (
    *("rnn", "rat_l16", "rat_l64", "rat_l128", "rat_l256", "attention"),
    *("rat_l64_full_qk", "rat_l64_token_rope"),
    *("reversed_c16", "reversed_c64", "reversed_c128"),
)
SIZES: Mapping[str, tuple[Callable[[], Hyperparameters], tuple[str, ...]]] = {
    "tiny": (tiny, SIX),
    "small": (small, SIX),
    "mid": (mid, SIX),
    "200m": (partial(paper_200m, 8192), _200M),
    "200m_16k": (partial(paper_200m, 16_384), _200M),
    "200m_32k": (partial(paper_200m, 32_768), _200M),
    "1p3b": (
        partial(paper_1p3b, 4096, 10_000.0),
        (*SIX, "rat_l128", "attention_swa_nope", "rat_swa_nope"),
    ),
    "1p3b_16k": (partial(paper_1p3b, 16_384, 500_000.0), SIX),
}
"""Each size with the architectures that are trained at it."""


def train_config(name: str, s: Hyperparameters, architecture: str) -> TrainConfig:
    """Return the run of one architecture with these hyperparameters."""
    mixers = ARCHITECTURES[architecture](s)
    every = tuple(mixers[i % len(mixers)] for i in range(s.num_layers))
    return s.run(name, LMConfig(vocab_size=s.vocab_size, d_model=s.d_model, mixers=every))


def recipe(size: str, architecture: str) -> TrainConfig:
    """Return the run of one architecture at one size; any pair of the two tables works."""
    make, _ = SIZES[size]
    return train_config(f"{size}_{architecture}", make(), architecture)


DESCRIPTIONS = {
    "rnn": "a gated linear RNN",
    "rnn_span16": "a gated linear RNN whose memories begin short",
    "rat_l16": "RAT, chunks of 16 tokens",
    "rat_l64": "RAT, chunks of 64",
    "rat_l64_span16": "RAT, chunks of 64, whose memories begin short",
    "rat_l128": "RAT, chunks of 128",
    "rat_l256": "RAT, chunks of 256",
    "attention": "softmax attention",
    "attention_alibi": "softmax attention with ALiBi for RoPE",
    "attention_swa": "attention, full and over a sliding window in turn",
    "rat_swa": "RAT, chunks of 16, and sliding-window attention in turn",
    "attention_swa_nope": "attention_swa, the full layers without positions",
    "rat_swa_nope": "rat_swa, RAT without positions",
    "rat_l64_full_qk": "RAT, chunks of 64, every head with its own queries and keys",
    "rat_l64_token_rope": "RAT, chunks of 64, RoPE by token",
    "reversed_c16": "RAT-Reversed: attention in 16 chunks, an RNN across them",
    "reversed_c64": "RAT-Reversed, 64 chunks",
    "reversed_c128": "RAT-Reversed, 128 chunks",
}
"""A description of each architecture, for the list of recipes."""
RECIPES, SUMMARIES = by_size(SIZES, recipe, DESCRIPTIONS)
"""All recipes by name, and what each is."""
