"""DRT whose lower half is of RAT and GSA: they read the text, the upper half retrieves chunks.

`python examples/drt_with_rat.py` trains a tiny one on the novels that mezzo-core brings.
"""

from pathlib import Path

from mezzo_core.console import show
from mezzo_core.data import load_tokenizer
from mezzo_core.nn import LMConfig, generate
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import train
from mezzo_drt import DRTConfig
from mezzo_gsa import GSAConfig
from mezzo_rat import RATConfig

STACK = DRTConfig(
    num_layers=4,
    chunk_size=16,
    num_retrieved=2,
    window_size=16,
    head_dim=16,
    hidden=128,
    num_encoder_layers=1,
    lower=(RATConfig(chunk_size=8, head_dim=16), GSAConfig(num_heads=4, num_slots=16)),
)
CONFIG = TrainConfig(
    name="drt_with_rat",
    model=LMConfig(vocab_size=257, d_model=64, stack=STACK),
    optim=OptimConfig(lr=5e-3, min_lr=5e-4, weight_decay=0.0),
    seq_len=128,
    steps=20,
    eval_batches=2,
)


def main() -> None:
    """Train, load what was saved, and write with it, past the next landmarks."""
    run = train(CONFIG, Path("runs/drt_with_rat"))
    model, _, _ = load_model(run.out / "model")
    tokenizer, prompt = load_tokenizer("byte"), "It is a truth"
    prompts = [tokenizer.encode(prompt)]
    (tokens,) = generate(model, prompts, max_new_tokens=40, temperature=0.8, seed=0)
    show(prompt + tokenizer.decode(tokens))


if __name__ == "__main__":
    main()
