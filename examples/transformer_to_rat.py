"""A Transformer is trained, turned into a RAT that keeps its weights, and tuned on.

`python examples/transformer_to_rat.py` does it with a tiny one in runs/transformer_to_rat, and
goes on from what it finds there.
"""

from dataclasses import replace
from pathlib import Path

from mezzo_core.nn import AttentionConfig, LMConfig
from mezzo_core.nn.checkpoint import load_model, save_model
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import train
from mezzo_gsa.convert import convert
from mezzo_rat import RATConfig

RUNS = Path("runs/transformer_to_rat")
TRANSFORMER = TrainConfig(
    name="transformer",
    model=LMConfig(vocab_size=257, d_model=64, mixers=(AttentionConfig(head_dim=16),) * 2),
    optim=OptimConfig(lr=5e-3, min_lr=5e-4, weight_decay=0.0),
    seq_len=128,
    steps=60,
    eval_batches=2,
)


def rat(attention: AttentionConfig, model: LMConfig) -> RATConfig:
    """Return the layer that takes the place of an attention layer."""
    return RATConfig(chunk_size=4, head_dim=attention.head_dim, num_groups=None)


def main() -> None:
    """Train the Transformer, convert it, and tune what it has become."""
    trained = train(TRANSFORMER, RUNS / "transformer")
    model, config, extra = load_model(trained.out / "model")
    config, weights = convert(config, model.state_dict(), rat)
    save_model(config.build(), config, RUNS / "start", extra, weights=weights)
    train(
        replace(TRANSFORMER, name="rat", model=config, init_from=str(RUNS / "start")),
        RUNS / "rat",
    )


if __name__ == "__main__":
    main()
