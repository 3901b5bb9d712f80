"""Fine-tuning by the paper's section 4.2, as functions that return a `TrainConfig`."""

from mezzo_core.data import DataConfig
from mezzo_core.errors import UserError, nearest
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.train.config import OptimConfig, TrainConfig

from mezzo_gsa.convert.convert import TARGETS, convert_config

MISTRAL_7B = LMConfig(
    vocab_size=32_000,
    d_model=4096,
    mixers=(AttentionConfig(head_dim=128, num_kv_heads=8, window_size=4096),) * 32,
    mlp=MLPConfig("swiglu", hidden=14_336),
    norm_eps=1e-5,
    tie_embeddings=False,
)
"""Mistral 7B v0.1, the Transformer that the paper fine-tunes."""

BATCH_TOKENS = 2**21
WARMUP_STEPS = 1000


def t2r(
    target: str, transformer: LMConfig = MISTRAL_7B, *, num_tokens: int = 20_000_000_000
) -> TrainConfig:
    """Return the run that fine-tunes a converted Transformer; set its `init_from` to the model.

    The paper gives AdamW's highest rate 3e-5, 1K steps of warm-up, T 2K, 2M tokens a step and
    20B or 100B tokens of SlimPajama. It does not give the schedule and the decay. These are taken
    from its other trainings: a cosine to a tenth of the rate, and a weight decay of 0.01.

    Args:
        target: one of `TARGETS`.
        transformer: the model that was converted; `train --init-from` replaces it by the folder's.
        num_tokens: of all steps; a step has 2,097,152.

    Raises:
        UserError: as `convert_config`; also if there is no such target, or the tokens fill no step.
    """
    if target not in TARGETS:
        raise UserError(f"target must be of {', '.join(TARGETS)}{nearest(target, TARGETS)}")
    if num_tokens < BATCH_TOKENS:
        raise UserError(f"num_tokens must fill a step of {BATCH_TOKENS:,}, got {num_tokens:,}")
    steps = num_tokens // BATCH_TOKENS
    return TrainConfig(
        name=f"t2r_{target}",
        model=convert_config(transformer, TARGETS[target]),
        data=DataConfig(
            source="hub:cerebras/SlimPajama-627B",
            tokenizer="hub:mistralai/Mistral-7B-v0.1",
            streaming=True,
        ),
        optim=OptimConfig(
            lr=3e-5,
            min_lr=3e-6,
            warmup_fraction=min(1.0, WARMUP_STEPS / steps),
            weight_decay=0.01,
        ),
        seq_len=2048,
        batch_size=BATCH_TOKENS // 2048,
        micro_batch_size=4,
        steps=steps,
        eval_every=1000,
        eval_batches=4,
        checkpoint_every=500,
        compile=True,
    )
