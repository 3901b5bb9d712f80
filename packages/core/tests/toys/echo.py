"""A toy task: the second half of a row repeats its first, and is all that is asked for."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from mezzo_core.data import NO_TARGET, Batch, BatchSource


@dataclass(frozen=True)
class EchoConfig:
    """Describes the task."""

    vocab_size: int = 8

    def build(
        self, seq_len: int, cache_dir: Path | None, *, rank: int = 0, world_size: int = 1
    ) -> "Echo":
        return Echo(seq_len, self.vocab_size)


class Echo(BatchSource):
    """Rows are drawn from the step's number, so that nothing must be kept to go on."""

    def __init__(self, seq_len: int, vocab_size: int) -> None:
        self.seq_len, self.vocab_size = seq_len, vocab_size
        self.fingerprint = f"echo {seq_len} {vocab_size}"

    def train_batch(self, step: int, batch_size: int) -> Batch:
        return self._rows(step, batch_size)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        return (self._rows(seed, batch_size) for seed in (-1, -2))

    def _rows(self, seed: int, batch_size: int) -> Batch:
        draw, half = torch.Generator().manual_seed(seed), self.seq_len // 2
        first = torch.randint(self.vocab_size, (batch_size, half), generator=draw)
        tokens = torch.cat([first, first], 1)
        targets = tokens.roll(-1, 1)
        targets[:, : half - 1], targets[:, -1] = NO_TARGET, NO_TARGET
        return Batch(tokens, targets)
