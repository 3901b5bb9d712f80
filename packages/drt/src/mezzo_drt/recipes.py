"""DRT, its ablations and the plain models beside it, as functions that return a `TrainConfig`.

A recipe's name is `<size>_<architecture>`: `tiny_drt1`, `128m_pg19_base`. To make a variant of a
recipe, call `dataclasses.replace(RECIPES[name](), ...)`.

| Size                  | Model              | Trains on                  | T   | W, L, R    |
|-----------------------|--------------------|----------------------------|-----|------------|
| tiny                  | C 64, 4 layers     | embedded novels, bytes     | 256 | 32, 16, 4  |
| small                 | C 320, 12 layers   | a text, GPT-2 tokens       | 4K  | 512, 64, 8 |
| 128m_pg19, 128m_math  | C 768, 12 layers   | PG19, arXiv; GPT-2 tokens  | 16K | 512, 64, 8 |
| 350m_pg19, 350m_math  | C 1024, 24 layers  | the same                   | 16K | 512, 64, 8 |

The last two rows are the paper's (section 4.1 and appendix A). It does not give the shape of its
350M models; ours is a common one for this size. Sizes are those of the plain model; DRT adds the
encoder and the cross-attention.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from mezzo_core.data import DataConfig
from mezzo_core.nn import AttentionConfig, LMConfig, MLPConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.recipes import AbstractHyperparameters, by_size

from mezzo_drt.stack import DRTConfig


@dataclass(frozen=True, kw_only=True)
class Hyperparameters(AbstractHyperparameters):
    """The hyperparameters that all architectures of one comparison share.

    Attributes:
        drt: the stack of DRT with one group; the other architectures have its layers and widths.
    """

    drt: DRTConfig


def tiny() -> Hyperparameters:
    """A third of a million weights: trains in a minute on a laptop, without network."""
    return Hyperparameters(
        vocab_size=257,
        d_model=64,
        drt=DRTConfig(
            num_layers=4,
            chunk_size=16,
            num_retrieved=4,
            window_size=32,
            head_dim=16,
            hidden=192,
            num_encoder_layers=1,
        ),
        seq_len=256,
        batch_size=4,
        steps=300,
        data=DataConfig(),
        optim=OptimConfig(lr=3e-3, min_lr=6e-4, warmup_fraction=0.1, weight_decay=1e-3),
        eval_batches=20,
    )


def small() -> Hyperparameters:
    """15M weights in the plain model's layers: for one GPU. The schedule is the paper's.

    Landmarks are compared without projections, as in the paper's released code: with projections,
    scores grow with the residual stream, without bound.
    """
    return Hyperparameters(
        vocab_size=50_257,
        d_model=320,
        # 8C/3, and a multiple of 8 for tensor cores
        drt=DRTConfig(hidden=856, projections=False),
        seq_len=4096,
        batch_size=4,
        steps=3000,
        data=DataConfig(
            source="hub:Salesforce/wikitext:wikitext-103-raw-v1",
            tokenizer="hub:openai-community/gpt2",
        ),
        optim=OPTIM,
        eval_every=500,
        checkpoint_every=1000,
        compile=True,
    )


def paper(num_layers: int, d_model: int, hidden: int, source: str) -> Hyperparameters:
    """One of the paper's trainings (appendix A): 2^19 tokens a step, 60K steps."""
    return Hyperparameters(
        vocab_size=50_257,
        d_model=d_model,
        drt=DRTConfig(num_layers=num_layers, hidden=hidden),
        seq_len=16_384,
        batch_size=32,
        micro_batch_size=2,
        steps=60_000,
        data=DataConfig(source=source, tokenizer="hub:openai-community/gpt2", streaming=True),
        optim=OPTIM,
        eval_every=1000,
        eval_batches=20,
        checkpoint_every=1000,
        compile=True,
    )


OPTIM = OptimConfig(
    lr=2e-3, min_lr=4e-4, warmup_fraction=0.02, betas=(0.9, 0.95), weight_decay=1e-3, clip=1.0
)
"""The paper's (appendix A)."""
PG19 = "hub:emozilla/pg19"
PROOF_PILE = "hub:hoskinson-center/proof-pile"
"""This corpus consists mostly of arXiv-math. A copy of that part alone can be given by `--data`."""
_128M = partial(paper, 12, 768, 2048)
_350M = partial(paper, 24, 1024, 2816)
SIZES: Mapping[str, Callable[[], Hyperparameters]] = {
    "tiny": tiny,
    "small": small,
    "128m_pg19": partial(_128M, PG19),
    "128m_math": partial(_128M, PROOF_PILE),
    "350m_pg19": partial(_350M, PG19),
    "350m_math": partial(_350M, PROOF_PILE),
}


def base(s: Hyperparameters) -> LMConfig:
    """Return BaseLM: plain layers with the same window."""
    return plain(s, s.drt.num_layers, s.drt.window_size)


def base_wide(s: Hyperparameters) -> LMConfig:
    """Return BaseLM with as many layers and DRT's attention field (window 768 in the paper)."""
    return plain(s, s.drt.num_layers, attention_field(s.drt) // s.drt.num_layers)


def base_deep(s: Hyperparameters) -> LMConfig:
    """Return BaseLM with two more layers and DRT's attention field (window 658 in the paper)."""
    num_layers = s.drt.num_layers + 2
    return plain(s, num_layers, attention_field(s.drt) // num_layers)


def attention_field(drt: DRTConfig) -> int:
    """Return the tokens that all layers see: windows, and what upper layers read (4.1.2)."""
    reading = drt.num_retrieved * drt.chunk_size
    return drt.num_layers * drt.window_size + drt.num_layers // 2 * reading


def plain(s: Hyperparameters, num_layers: int, window_size: int) -> LMConfig:
    """Return a model of layers like DRT's lower ones."""
    drt = s.drt
    attention = AttentionConfig(drt.head_dim, window_size=window_size, rope_base=None, alibi="olmo")
    return LMConfig(
        s.vocab_size,
        s.d_model,
        mixers=(attention,) * num_layers,
        mlp=MLPConfig("swiglu", drt.hidden),
        norm_eps=drt.norm_eps,
    )


def with_changes(s: Hyperparameters, **changes: object) -> LMConfig:
    """Return DRT with other options."""
    stack = replace(s.drt, **changes)  # type: ignore[arg-type]
    return LMConfig(s.vocab_size, s.d_model, norm_eps=s.drt.norm_eps, stack=stack)


ARCHITECTURES: Mapping[str, Callable[[Hyperparameters], LMConfig]] = {
    "base": base,
    "base_wide": base_wide,
    "base_deep": base_deep,
    "drt1": with_changes,
    "drt2": partial(with_changes, num_groups=2),
    "no_gumbel": partial(with_changes, gumbel_noise=False),
    "random": partial(with_changes, retriever="random"),
    "fixed": partial(with_changes, retriever="fixed"),
}
"""`drt1` and `drt2` retrieve once and twice. The last three are ablations of `drt1`: no noise in
training, random chunks, and chunks chosen by a similarity of lower outputs that is not learned."""
PAPER_NAMES = {
    "base": "BaseLM (sliding window + ALiBi)",
    "base_wide": "BaseLM (sliding window + ALiBi), window 768",
    "base_deep": "BaseLM (sliding window + ALiBi) +2 layers",
    "drt1": "DRT_retrieval\N{MULTIPLICATION SIGN}1",
    "drt2": "DRT_retrieval\N{MULTIPLICATION SIGN}2",
    "no_gumbel": "DRT w/o gumbel top-k",
    "random": "DRT w/ random retriever",
    "fixed": "DRT w/ fixed retriever",
}
"""The names in the paper's Table 1, and one like them."""


def recipe(size: str, architecture: str) -> TrainConfig:
    """Return the run of one architecture at one size."""
    s = SIZES[size]()
    return s.run(f"{size}_{architecture}", ARCHITECTURES[architecture](s))


DESCRIPTIONS = {
    "base": "sliding-window attention alone",
    "base_wide": "sliding-window attention, a window as wide as what DRT sees",
    "base_deep": "the same, with two layers more",
    "drt1": "DRT, one retrieval of past chunks",
    "drt2": "DRT, two retrievals",
    "no_gumbel": "DRT without noise in training",
    "random": "DRT, chunks at random",
    "fixed": "DRT, chunks by a similarity that is not learned",
}
"""What each architecture is, for the list of recipes."""
_EVERY = {size: (make, ARCHITECTURES) for size, make in SIZES.items()}
RECIPES, SUMMARIES = by_size(_EVERY, recipe, DESCRIPTIONS)
"""All recipes by name, and what each is."""
