"""Counting words: those that are common in a list, and the most frequent ones of a coded text."""

import math
from random import Random
from string import ascii_lowercase

from mezzo_core.eval.ruler.prose import words
from mezzo_core.eval.ruler.question import Question, Task

_COMMON = 10
_SHORT = 4096
"""Below this length, words are repeated less often, and the example is shorter."""


def _write_common(draw: Random, size: int, length: int) -> Question:
    """Write a solved example and a question; the size counts different words."""
    example, question = ((20, 3, 1), (size, 6, 1))
    if length >= _SHORT:
        example, question = ((40, 10, 3), (size, 30, 3))
    solved, common = _listed(draw, *example)
    prompt, answers = _listed(draw, *question)
    return Question(f"{solved} {_numbered(common)}\n{prompt}", answers)


def _listed(draw: Random, size: int, repeats: int, others: int) -> tuple[str, list[str]]:
    """Return a question about a list of words, and those that come `repeats` times."""
    chosen = draw.sample(words(), size)
    common = chosen[:_COMMON]
    listed = common * repeats + chosen[_COMMON:] * others
    draw.shuffle(listed)
    prompt = (
        "Below is a numbered list of words. In these words, some appear more often than others. "
        f"Memorize the ones that appear most often.\n{_numbered(listed)}\n"
        f"Question: What are the {_COMMON} most common words in the above list? "
        f"Answer: The top {_COMMON} words that appear most often in the list are:"
    )
    return prompt, common


def _numbered(listed: list[str]) -> str:
    return " ".join(f"{i}. {word}" for i, word in enumerate(listed, start=1))


def _write_frequent(draw: Random, size: int, length: int) -> Question:
    """Write a question about words whose counts fall as the square of their rank.

    The size counts words of the text. The most frequent one is dots, which are to be ignored.
    """
    coded: dict[str, None] = {}
    while len(coded) < max(length // 50, 5):
        coded["".join(draw.choices(ascii_lowercase, k=6))] = None
    ranked = ["...", *list(coded)[1:]]
    share = size * 6 / math.pi**2  # zeta(2) is the sum of all 1 / rank^2
    text = [word for k, word in enumerate(ranked, start=1) for _ in range(int(share / k**2))]
    draw.shuffle(text)
    prompt = (
        "Read the following coded text and track the frequency of each coded word. Find the three "
        f"most frequently appeared coded words. {' '.join(text)}\nQuestion: Do not provide any "
        "explanation. Please ignore the dots '....'. What are the three most frequently appeared "
        "words in the above coded text? Answer: According to the coded text above, the three most "
        "frequently appeared words are:"
    )
    return Question(prompt, ranked[1:4])


COUNTS = (
    Task("ruler_cwe", 120, 2 * _COMMON, len(words()), _write_common),
    Task("ruler_fwe", 50, 120, None, _write_frequent),
)
