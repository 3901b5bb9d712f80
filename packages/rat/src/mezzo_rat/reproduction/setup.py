"""The paper's configurations against our recipes, field by field."""

from collections.abc import Mapping

from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.papers import Claim, Finding, Measurement, ResultRow, Status
from mezzo_core.train.config import TrainConfig

from mezzo_rat.mixer import RATConfig
from mezzo_rat.recipes import RECIPES

# Counts of tokens are printed rounded (15B, 2M); the recipes take powers of two near them.
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
    return _compare(claim, ours, "recipes 200m_rat_l64, 200m_16k_rat_l64, 200m_32k_rat_l64")


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
    return _compare(claim, ours, "recipes 1p3b_rat_swa, 1p3b_16k_rat_swa")


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


def _compare(claim: Claim, ours: Mapping[str, float], recipes: str) -> Finding:
    printed = {label: float(value) for label, value in claim.labelled().items()}
    wrong = [
        label
        for label, value in printed.items()
        if abs(ours[label] - value) > ROUNDED.get(label, 1e-12) * value
    ]
    summary = f"our recipes have all {len(printed)} printed values"
    if wrong:
        summary = "our recipes differ in " + ", ".join(wrong)
    return Finding(
        claim.id,
        "claim",
        Status.DIFFERS if wrong else Status.REPRODUCED,
        f"{summary}; token counts to the printed precision; nothing was trained",
        (
            Measurement(
                ("printed", "ours"),
                tuple(ResultRow(label, ((printed[label], ours[label]),)) for label in printed),
                recipes,
            ),
        ),
    )
