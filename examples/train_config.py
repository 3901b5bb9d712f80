"""The whole training by one call, with checkpoints and logs: GSA learns to repeat a first token."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mezzo_core.data import NO_TARGET, Rows, RowsData
from mezzo_core.nn import LMConfig
from mezzo_core.train.config import OptimConfig, TrainConfig
from mezzo_core.train.loop import train
from mezzo_gsa import GSAConfig

VOCAB = 16


@dataclass(frozen=True)
class FirstTokenConfig:
    """A task: at the end of a row, say its first token. `train` takes it in the place of text."""

    num_rows: int = 512

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> RowsData:
        """Draw the rows."""
        train_rows, test_rows = (self._rows(seq_len, seed) for seed in (0, 1))
        return RowsData("first token", train_rows, test_rows, vocab_size=VOCAB, seed=0)

    def _rows(self, seq_len: int, seed: int) -> Rows:
        inputs = np.random.default_rng(seed).integers(0, VOCAB, (self.num_rows, seq_len))
        targets = np.full_like(inputs, NO_TARGET)
        targets[:, -1] = inputs[:, 0]
        return Rows(inputs, targets)


model = LMConfig(VOCAB, d_model=32, mixers=(GSAConfig(num_heads=2, num_slots=8),) * 2)
config = TrainConfig(
    "first_token",
    model,
    data=FirstTokenConfig(),
    optim=OptimConfig(lr=1e-2),
    seq_len=8,
    batch_size=32,
    steps=100,
)
result = train(config, Path("runs/first_token"), quiet=True)  # the same call resumes a killed run
print(f"{result.val_accuracy:.0%} right after {result.steps} steps; see {result.out}")
