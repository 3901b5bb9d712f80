"""The baselines as whole models, at any size (the paper's section 4.1, "Baselines").

BaseLM, whose layers these have otherwise, is among the recipes.

| Model                      | Layers   | Sees                                                    |
|----------------------------|----------|---------------------------------------------------------|
| `landmark_lm`              | as given | 8 chunks of 64 that are near, and 4 that it picks       |
| `block_recurrent_lm`       | as given | a window of 768; one layer has 512 recurrent states     |
"""

from dataclasses import dataclass, fields

from mezzo_core.config_json import check_fields
from mezzo_core.nn import MLPConfig
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.ops.checks import check_size

from mezzo_drt.baselines.block_recurrent import BlockRecurrentConfig
from mezzo_drt.baselines.landmark import LandmarkConfig

NORM_EPS = 1e-5


@dataclass(frozen=True)
class ModelSize:
    """The size of a Llama-like model; the defaults are the paper's 128M (appendix A).

    Attributes:
        vocab_size: rows of the embedding.
        d_model: C.
        num_layers: layers.
        head_dim: D.
        hidden: F, of the SwiGLU.
    """

    vocab_size: int = 50_257
    d_model: int = 768
    num_layers: int = 12
    head_dim: int = 64
    hidden: int = 2048

    def __post_init__(self) -> None:
        check_fields(self)
        for each in fields(self):
            check_size("ModelSize", each.name, getattr(self, each.name))

    @property
    def mlp(self) -> MLPConfig:
        """The MLP of every layer."""
        return MLPConfig("swiglu", self.hidden)


def landmark_lm(size: ModelSize, chunk_size: int = 64, *, offload: bool = False) -> LMConfig:
    """Return the Landmark Attention model, which sees 12 chunks; train it on rows of so many.

    With `offload` a state keeps its chunks in the host's memory.
    """
    stack = LandmarkConfig(
        num_layers=size.num_layers,
        head_dim=size.head_dim,
        chunk_size=chunk_size,
        mlp=size.mlp,
        norm_eps=NORM_EPS,
        offload=offload,
    )
    return LMConfig(size.vocab_size, size.d_model, norm_eps=NORM_EPS, stack=stack)


def block_recurrent_lm(
    size: ModelSize, window_size: int = 768, block_size: int = 512, num_states: int = 512
) -> LMConfig:
    """Return BaseLM with one recurrent layer, before the last two (Hutchins et al.: 10th of 12)."""
    recurrent = BlockRecurrentConfig(
        head_dim=size.head_dim,
        num_states=num_states,
        block_size=block_size,
        window_size=window_size,
        norm_eps=NORM_EPS,
    )
    window = AttentionConfig(size.head_dim, window_size=window_size, rope_base=None, alibi="olmo")
    mixers: list[MixerConfig] = [window] * size.num_layers
    mixers[max(size.num_layers - 3, 0)] = recurrent
    return LMConfig(size.vocab_size, size.d_model, tuple(mixers), size.mlp, NORM_EPS)
