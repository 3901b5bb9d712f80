"""The baselines as whole models, with the sizes of recipes (the paper's section 4.1, "Baselines").

Their other layers are those of BaseLM, which is among the recipes.

| Model                | Sees, at the paper's sizes                                             |
|----------------------|------------------------------------------------------------------------|
| `landmark_lm`        | 8 chunks of 64 that are near, and 4 that it picks                      |
| `block_recurrent_lm` | a window of 768; one layer has 512 recurrent states, for blocks of 512 |
"""

from mezzo_core.nn import MLPConfig
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.configs import MixerConfig
from mezzo_core.nn.lm import LMConfig

from mezzo_drt.baselines.block_recurrent import BlockRecurrentConfig
from mezzo_drt.baselines.landmark import LandmarkConfig
from mezzo_drt.recipes import Hyperparameters


def landmark_lm(s: Hyperparameters) -> LMConfig:
    """Return the Landmark Attention model, which sees 12 chunks; train it on rows of 12 chunks.

    With `offload` in `s.drt` a state keeps its chunks in the host's memory.
    """
    drt = s.drt
    stack = LandmarkConfig(
        num_layers=drt.num_layers,
        head_dim=drt.head_dim,
        chunk_size=drt.chunk_size,
        mlp=MLPConfig("swiglu", drt.hidden),
        norm_eps=drt.norm_eps,
        offload=drt.offload,
    )
    return LMConfig(s.vocab_size, s.d_model, norm_eps=drt.norm_eps, stack=stack)


def block_recurrent_lm(s: Hyperparameters) -> LMConfig:
    """Return BaseLM with one recurrent layer, before the last two (Hutchins et al.: 10th of 12)."""
    drt, W = s.drt, s.drt.window_size
    recurrent = BlockRecurrentConfig(
        head_dim=drt.head_dim,
        num_states=W,
        block_size=W,
        window_size=W * 3 // 2,
        norm_eps=drt.norm_eps,
    )
    window = AttentionConfig(drt.head_dim, window_size=W * 3 // 2, rope_base=None, alibi="olmo")
    mixers: list[MixerConfig] = [window] * drt.num_layers
    mixers[max(drt.num_layers - 3, 0)] = recurrent
    mlp = MLPConfig("swiglu", drt.hidden)
    return LMConfig(s.vocab_size, s.d_model, tuple(mixers), mlp, drt.norm_eps)
