"""Tasks of memory: a fixed map that the weights learn, and a row kept in one vector.

memorization  k1 _ k2 _ ...      target at each blank: the key's value, the same in every row
compression   a b c ... |        targets: the inputs, to be told from the last token alone
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from mezzo_core.data import NO_TARGET

from mezzo_recurrent_transformer.synthetic.task import ROWS_SEED, AbstractTask, Draws, Row


@dataclass(frozen=True)
class MemorizationConfig(AbstractTask):
    """A map from keys to values, the same in all rows.

    The last token is the blank; of the others, keys are the first half and values the second.
    """

    vocab_size: int = 256
    seq_len: int = 32
    train_rows: int = 256

    @property
    def name(self) -> str:
        """MAD's name of the task."""
        return "memorization"

    def rules(self) -> Mapping[str, tuple[bool, str]]:
        """Return the limits."""
        return {
            "vocab_size": (self.vocab_size >= 3, "at least 3"),
            "seq_len": (self.seq_len >= 2 and self.seq_len % 2 == 0, "even and at least 2"),
        }

    def value_of(self) -> dict[int, int]:
        """Return the map, its keys in the order in which MAD draws from them."""
        blank = self.vocab_size - 1
        draw = np.random.default_rng(ROWS_SEED)
        keys, values = list(range(blank // 2)), list(range(blank // 2, blank))
        draw.shuffle(keys)
        draw.shuffle(values)
        return dict(zip(keys, values, strict=False))  # an odd value is left over

    def rows(self, draws: Draws, *, is_test: bool) -> Iterator[Row]:
        """Yield rows."""
        value_of = self.value_of()
        keys, pairs = list(value_of), self.seq_len // 2
        while True:
            draws.below(pairs)  # MAD draws a place here, and never uses it
            shown = [keys[draws.below(len(keys))] for _ in range(pairs)]
            inputs = np.full((pairs, 2), self.vocab_size - 1)
            targets = np.full((pairs, 2), NO_TARGET)
            inputs[:, 0], targets[:, 1] = shown, [value_of[key] for key in shown]
            yield inputs.flatten().tolist(), targets.flatten().tolist()


@dataclass(frozen=True)
class CompressionConfig(AbstractTask):
    """Random tokens and a bar. The targets are the inputs, the bar among them, as in MAD.

    A model that sees its inputs has nothing to do, so `AutoEncoderConfig` tells the whole row from
    one vector: the encoder's output at the bar.
    """

    seq_len: int = 32

    @property
    def name(self) -> str:
        """MAD's name of the task."""
        return "compression"

    def rules(self) -> Mapping[str, tuple[bool, str]]:
        """Return the limits."""
        return {
            "vocab_size": (self.vocab_size >= 2, "at least 2"),
            "seq_len": (self.seq_len >= 2, "at least 2"),
        }

    def rows(self, draws: Draws, *, is_test: bool) -> Iterator[Row]:
        """Yield rows."""
        bar = self.vocab_size - 1
        while True:
            inputs = [*draws.new.integers(0, bar, size=self.seq_len - 1).tolist(), bar]
            yield inputs, inputs
