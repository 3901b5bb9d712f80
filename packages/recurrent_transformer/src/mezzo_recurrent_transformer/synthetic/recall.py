"""Recall in context: keys with values, where a key comes again with the same value.

    in-context  k1 v1 k2 v2 k1 v1 k3 v3 ...     a key or a value is one token
    noisy       the same with pairs of noise between them
    fuzzy       keys and values are of one to three tokens, in the test keys of three

In training every next token is a target, in the test only the values of keys seen before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

import numpy as np
from mezzo_core.data import NO_TARGET
from numpy.typing import NDArray

from mezzo_recurrent_transformer.synthetic.task import AbstractTask, Draws, Row

MOTIF = 3
"""Tokens of a fuzzy key or value, at most."""


@dataclass(frozen=True)
class RecallConfig(AbstractTask):
    """In-context recall, and with noise noisy recall.

    Attributes:
        num_noise: tokens of noise, the last ones of the vocabulary. Of the others, keys are the
            first half, values the second.
        noise_share: share of the pairs that are noise, one pair a row excepted.
    """

    num_noise: int = 0
    noise_share: float = 0.0

    @property
    def name(self) -> str:
        """MAD's name of the task."""
        return "noisy-in-context-recall" if self.num_noise else "in-context-recall"

    @property
    def num_tokens(self) -> int:
        """One less than `seq_len`: the last value is a target alone."""
        return self.seq_len - 1

    def rules(self) -> Mapping[str, tuple[bool, str]]:
        """Return the limits."""
        return {
            "seq_len": (self.seq_len >= 4 and self.seq_len % 2 == 0, "even and at least 4"),
            "num_noise": (0 <= self.num_noise <= self.vocab_size - 2, "from 0 to vocab_size - 2"),
            "noise_share": (
                0 <= self.noise_share <= 1 and (self.noise_share > 0) == (self.num_noise > 0),
                "above 0 and at most 1 with num_noise, and 0 without",
            ),
        }

    def rows(self, draws: Draws, *, is_test: bool) -> Iterator[Row]:
        """Yield rows: seq_len / 2 - 1 pairs, then the pair of a key that was shown."""
        while True:
            yield _shifted(*self._pairs(draws), is_test)

    def _pairs(self, draws: Draws) -> Row:
        """Return tokens, and the values of known keys in their places."""
        first_noise = self.vocab_size - self.num_noise
        num_keys = first_noise // 2
        kept = draws.below(self.seq_len // 2)  # a pair spared from noise; drawn without noise too
        known: dict[int, int] = {}
        tokens: list[int] = []
        values: list[int] = []
        for place in range(self.seq_len // 2 - 1):
            if self.num_noise and place != kept and draws.new.random() < self.noise_share:
                tokens += (first_noise + draws.new.integers(0, self.num_noise, size=2)).tolist()
                values += [NO_TARGET] * 2
                continue
            key = draws.below(num_keys)
            is_known = key in known
            if not is_known:
                known[key] = num_keys + draws.below(first_noise - num_keys)
            tokens += [key, known[key]]
            values += [NO_TARGET, known[key] if is_known else NO_TARGET]
        if not known:
            return self._pairs(draws)
        key = list(known)[draws.below(len(known))]
        return [*tokens, key, known[key]], [*values, NO_TARGET, known[key]]


@dataclass(frozen=True)
class FuzzyRecallConfig(AbstractTask):
    """Recall of keys and values of several tokens.

    The last token is filler on the left; of the others, keys are of the first half and values of
    the second. A key or a value is a permutation: no token comes twice in it. One pair, the probe,
    is put in at some place and asked for at the end. As in MAD, in a few rows that place is never
    reached, so that the end cannot be known.
    """

    @property
    def name(self) -> str:
        """MAD's name of the task."""
        return "fuzzy-in-context-recall"

    def rules(self) -> Mapping[str, tuple[bool, str]]:
        """Return the limits."""
        return {
            "vocab_size": (self.vocab_size > 2 * MOTIF, f"at least {2 * MOTIF + 1}"),
            "seq_len": (self.seq_len > 4 * MOTIF, f"at least {4 * MOTIF + 1}"),
        }

    def rows(self, draws: Draws, *, is_test: bool) -> Iterator[Row]:
        """Yield rows: filler, pairs, the probe."""
        filler = self.vocab_size - 1
        lengths = range(1, MOTIF + 1)
        keys, values = range(filler // 2), range(filler // 2, filler)
        all_keys = [_permutations(keys, length) for length in (lengths if not is_test else [MOTIF])]
        all_values = [_permutations(values, length) for length in lengths]
        while True:
            # MAD shuffles anew for each row, and then draws from what is shuffled.
            shuffled = [draws.new.permutation(len(each)) for each in (*all_keys, *all_values)]
            its_keys = _Motifs(all_keys, shuffled[: len(all_keys)])
            its_values = _Motifs(all_values, shuffled[len(all_keys) :])
            tokens, targets = self._pairs(draws, its_keys, its_values)
            missing = self.seq_len + 1 - len(tokens)
            tokens = [filler] * missing + tokens
            yield _shifted(tokens, [NO_TARGET] * missing + targets, is_test)

    def _pairs(self, draws: Draws, keys: "_Motifs", values: "_Motifs") -> Row:
        """Return the tokens of pairs, and the values of known keys in their places."""
        of_key, of_value = keys.length(draws), values.length(draws)
        probe = keys.draw(draws, of_key)
        value_of = {probe: values.draw(draws, of_value)}
        size = len(probe) + len(value_of[probe])
        place = draws.below(self.seq_len - 2 * size)
        seen: set[tuple[int, ...]] = set()
        tokens: list[int] = []
        targets: list[int] = []

        def put(key: tuple[int, ...]) -> None:
            value = value_of[key]
            tokens.extend((*key, *value))
            targets.extend([NO_TARGET] * len(key))
            targets.extend(value if key in seen else [NO_TARGET] * len(value))
            seen.add(key)

        while len(tokens) < self.seq_len - size - 2 * MOTIF:
            # Both lengths are drawn, also where the probe has its own.
            of_key, of_value = keys.length(draws), values.length(draws)
            if probe not in seen and len(tokens) >= place:
                put(probe)
                continue
            key = keys.draw(draws, of_key)
            if key not in value_of:
                value_of[key] = values.draw(draws, of_value)
            put(key)
        seen.add(probe)  # its value counts at the end, even if the place was never reached
        put(probe)
        return tokens, targets


class _Motifs:
    """Motifs of several lengths, shuffled, to draw from."""

    def __init__(
        self, motifs: Sequence[NDArray[np.int64]], order: Sequence[NDArray[np.int64]]
    ) -> None:
        self._motifs, self._order = motifs, order

    def length(self, draws: Draws) -> int:
        """Draw the index of a length; if there is only one, nothing is drawn."""
        return draws.below(len(self._motifs)) if len(self._motifs) > 1 else 0

    def draw(self, draws: Draws, length: int) -> tuple[int, ...]:
        """Draw a motif of this length."""
        index = self._order[length][draws.below(len(self._order[length]))]
        return tuple(self._motifs[length][index].tolist())


def _permutations(tokens: Sequence[int], length: int) -> NDArray[np.int64]:
    return np.array(list(permutations(tokens, length)), dtype=np.int64)


def _shifted(tokens: list[int], targets: list[int], is_test: bool) -> Row:
    """Return all tokens but the last, and what is asked for after each of them."""
    return tokens[:-1], (targets if is_test else tokens)[1:]
