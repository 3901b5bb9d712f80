"""Tasks that copy: words between blanks (MAD), and whole strings ("Repeat After Me").

selective copying  b c _ _ a _ | _ _ _     targets at the last places: b c a
copying            $ b c a | b c a .       targets after the bar: b c a and the dot
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from mezzo_core.data import NO_TARGET

from mezzo_recurrent_transformer.synthetic.task import AbstractTask, Draws, Row


@dataclass(frozen=True)
class SelectiveCopyingConfig(AbstractTask):
    """Words between blanks, which are asked for after the bar, without the blanks.

    The last two tokens are the blank and the bar.

    Attributes:
        num_words: words to copy.
    """

    seq_len: int = 256
    num_words: int = 16

    @property
    def name(self) -> str:
        """MAD's name of the task."""
        return "selective-copying"

    def rules(self) -> Mapping[str, tuple[bool, str]]:
        """Return the limits."""
        most = (self.seq_len - 1) // 2
        return {
            "vocab_size": (self.vocab_size >= 3, "at least 3"),
            "num_words": (1 <= self.num_words <= most, f"from 1 to (seq_len - 1) / 2 = {most}"),
        }

    def rows(self, draws: Draws, *, is_test: bool) -> Iterator[Row]:
        """Yield rows; the blanks never come after the last word."""
        n, blank = self.num_words, self.vocab_size - 2
        unasked = [NO_TARGET] * (self.seq_len - n)
        while True:
            words = draws.new.integers(0, blank, size=n)
            before = draws.legacy.randint(0, n, self.seq_len - 2 * n - 1)  # a word for each blank
            mixed = np.insert(words, before, blank)
            yield [*mixed.tolist(), blank + 1, *[blank] * n], unasked + words.tolist()


@dataclass(frozen=True)
class CopyingConfig(AbstractTask):
    """Strings of letters and their copies (Jelassi et al. 2024, arXiv 2402.01032).

    The last four tokens are `$`, `|`, `.` and filler. A training row is filled with strings; the
    last has no targets if it is cut off. A test row has one string, and then filler, so that a row
    is right if its string is. The paper does not say how long its strings are: these are the
    defaults of the released code.

    Attributes:
        min_letters: letters of the shortest string.
        max_letters: of the longest. Lengths are drawn uniformly, for training and the test alike.
    """

    vocab_size: int = 30
    seq_len: int = 220
    min_letters: int = 5
    max_letters: int = 20

    @property
    def name(self) -> str:
        """The task's name; the task is not one of MAD's."""
        return "copying"

    def rules(self) -> Mapping[str, tuple[bool, str]]:
        """Return the limits."""
        most = (self.seq_len - 2) // 2
        few = f"from 1 to max_letters = {self.max_letters}"
        return {
            "vocab_size": (self.vocab_size >= 5, "at least 5"),
            "max_letters": (1 <= self.max_letters <= most, f"from 1 to seq_len / 2 - 1 = {most}"),
            "min_letters": (1 <= self.min_letters <= self.max_letters, few),
        }

    def rows(self, draws: Draws, *, is_test: bool) -> Iterator[Row]:
        """Yield rows."""
        letters = self.vocab_size - 4
        first, bar, dot, filler = range(letters, self.vocab_size)
        size = self.seq_len + 1
        while True:
            tokens: list[int] = []
            targets: list[int] = []
            while len(tokens) < size:
                length = int(draws.new.integers(self.min_letters, self.max_letters + 1))
                string = draws.new.integers(0, letters, size=length).tolist()
                is_cut = len(tokens) + 2 * length + 3 > size
                tokens += [first, *string, bar, *string, dot]
                asked = [NO_TARGET] * (length + 1) if is_cut else [*string, dot]
                targets += [NO_TARGET] * (length + 2) + asked
                if is_test:
                    missing = size - len(tokens)
                    tokens, targets = tokens + [filler] * missing, targets + [NO_TARGET] * missing
            yield tokens[: size - 1], targets[1:size]
