"""LongBench's scores of an answer, from 0 to 1, in the words of its `metrics.py`."""

import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from difflib import SequenceMatcher

Score = Callable[[str, str, Sequence[str]], float]
"""Scores what the model wrote by a right answer, and by all classes where answers are classes."""


def f1(written: str, answer: str, classes: Sequence[str]) -> float:
    """Return the F1 of the words, without case, punctuation and articles."""
    ours, right = (Counter(_words(text)) for text in (written, answer))
    same = (ours & right).total()
    return 2 * same / (ours.total() + right.total()) if same else 0.0


def _words(text: str) -> list[str]:
    text = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", text).split()


def rouge_l(written: str, answer: str, classes: Sequence[str]) -> float:
    """Return ROUGE-L as the package `rouge` defines it: an F1 of distinct words.

    A word counts if it is in a longest common subsequence of two sentences, one of each text.
    """
    texts = (written, answer)
    ours, right = ([_sentence(part) for part in text.split(".") if part] for text in texts)
    common = {word for mine in ours for its in right for word in _common(its, mine)}
    counts = [len({word for sentence in text for word in sentence}) for text in (ours, right)]
    if not common:
        return 0.0
    precision, recall = (len(common) / count for count in counts)
    return 2 * precision * recall / (precision + recall + 1e-8)


def _sentence(text: str) -> list[str]:
    return " ".join(text.split()).split(" ")


def _common(x: Sequence[str], y: Sequence[str]) -> list[str]:
    """Return a longest common subsequence."""
    best = [[0] * (len(y) + 1) for _ in range(len(x) + 1)]
    for i, word in enumerate(x, 1):
        for j, other in enumerate(y, 1):
            longer = max(best[i - 1][j], best[i][j - 1])
            best[i][j] = best[i - 1][j - 1] + 1 if word == other else longer
    i, j, found = len(x), len(y), []
    while i and j:
        if x[i - 1] == y[j - 1]:
            found.append(x[i - 1])
            i, j = i - 1, j - 1
        elif best[i - 1][j] > best[i][j - 1]:
            i -= 1
        else:
            j -= 1
    return found


def class_named(written: str, answer: str, classes: Sequence[str]) -> float:
    """Return 1 over the number of classes that the text names, if it names the right one.

    A class whose name is a part of the right one's does not count. But of several such classes in a
    row the second, fourth and so on count: LongBench's loop removes items from the list that it
    runs over, and skips these.
    """
    named: list[str] = []
    is_removed = False
    for name in filter(written.__contains__, classes):
        is_removed = not is_removed and name != answer and name in answer
        if not is_removed:
            named.append(name)
    return 1 / len(named) if answer in named else 0.0


def numbers(written: str, answer: str, classes: Sequence[str]) -> float:
    """Return the share of the numbers that are the answer's."""
    found, right = (re.findall(r"\d+", text) for text in (written, answer))
    return found.count(right[0]) / len(found) if found and right else 0.0


def code(written: str, answer: str, classes: Sequence[str]) -> float:
    """Return the similarity of the first line of code, which is no comment and no fence."""
    is_code = re.compile(r"(?!.*(`|#|//))").match
    lines = filter(is_code, written.lstrip("\n").split("\n"))
    return round(100 * SequenceMatcher(None, next(lines, ""), answer).ratio()) / 100


SCORES: Mapping[str, Score] = {
    "f1": f1,
    "rouge_l": rouge_l,
    "classes": class_named,
    "numbers": numbers,
    "code": code,
}
"""By their names in tasks.toml."""
