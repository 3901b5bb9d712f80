"""Comparison of the paper's configurations with our recipes, field by field."""

from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.papers import Claim, Finding
from mezzo_core.reproduction.checks import compare_setup
from mezzo_core.train.config import TrainConfig

from mezzo_rat.mixer import RATConfig
from mezzo_rat.recipes import RECIPES

# The paper prints rounded counts of tokens (15B, 2M); the recipes use powers of two near them.
ROUNDED = {"tokens": 0.01, "batch tokens": 0.05}


def setup_200m(claim: Claim) -> Finding:
    """Compare the 200M recipes, RAT(L=64) at its three contexts."""
    config = RECIPES["200m_rat_l64"]()
    contexts = [RECIPES[f"200m{size}_rat_l64"]().seq_len for size in ("", "_16k", "_32k")]
    ours = {
        **_shared(config),
        "weight decay": config.optim.weight_decay,
        "beta1": config.optim.betas[0],
        "beta2": config.optim.betas[1],
        "gradient clip": config.optim.clip,
        **{f"context {i}": length for i, length in enumerate(contexts, 1)},
    }
    recipes = "recipes 200m_rat_l64, 200m_16k_rat_l64, 200m_32k_rat_l64"
    return compare_setup(claim, ours, recipes, ROUNDED)


def setup_1p3b(claim: Claim) -> Finding:
    """Compare the 1.3B recipes, RAT(L=16)-SWA at 4K and its RoPE base at 16K."""
    config = RECIPES["1p3b_rat_swa"]()
    windows = [m.window_size for m in config.model.mixers if isinstance(m, AttentionConfig)]
    ours = {
        **_shared(config),
        "RoPE base at 16K": _rat(RECIPES["1p3b_16k_rat_swa"]()).rope_base,
        "init std": config.model.init_std,
        "context": config.seq_len,
        "SWA window": windows[0] or 0,
    }
    return compare_setup(claim, ours, "recipes 1p3b_rat_swa, 1p3b_16k_rat_swa", ROUNDED)


def _shared(config: TrainConfig) -> dict[str, float]:
    rat = _rat(config)
    batch_tokens = config.batch_size * config.seq_len
    return {
        "model dimension": config.model.d_model,
        "layers": len(config.model.mixers),
        "head dimension": rat.head_dim,
        "RoPE base": rat.rope_base,
        "tokens": config.steps * batch_tokens,
        "peak learning rate": config.optim.lr,
        "final learning rate": config.optim.min_lr,
        "warm-up fraction": config.optim.warmup_fraction,
        "batch tokens": batch_tokens,
    }


def _rat(config: TrainConfig) -> RATConfig:
    return next(mixer for mixer in config.model.mixers if isinstance(mixer, RATConfig))
