"""One model with layers of three papers, trained on the novels that mezzo-core brings.

RAT, GSA, window attention and a recurrent layer take turns: `python examples/hybrid.py`.
"""

from pathlib import Path

from mezzo_core.console import show
from mezzo_core.data import load_tokenizer
from mezzo_core.nn import AttentionConfig, BlocksConfig, LMConfig, MixerBlockConfig, generate
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import train
from mezzo_gsa import GSAConfig
from mezzo_rat import RATConfig
from mezzo_recurrent_transformer import RecurrentBlockConfig

LAYERS = (
    MixerBlockConfig(RATConfig(chunk_size=8, head_dim=16)),
    MixerBlockConfig(GSAConfig(num_heads=4, num_slots=16)),
    MixerBlockConfig(AttentionConfig(head_dim=16, window_size=32)),
    RecurrentBlockConfig(head_dim=16),
)
CONFIG = TrainConfig(
    name="hybrid",
    model=LMConfig(vocab_size=257, d_model=64, stack=BlocksConfig(LAYERS)),
    optim=OptimConfig(lr=5e-3, min_lr=5e-4, weight_decay=0.0),
    seq_len=32,
    steps=20,
    eval_batches=2,
)


def main() -> None:
    """Train, load what was saved, and write with it."""
    run = train(CONFIG, Path("runs/hybrid"))
    model, _, _ = load_model(run.out / "model")
    tokenizer, prompt = load_tokenizer("byte"), "It is a truth"
    prompts = [tokenizer.encode(prompt)]
    (tokens,) = generate(model, prompts, max_new_tokens=40, temperature=0.8, seed=0)
    show(prompt + tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
