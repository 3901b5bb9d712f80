"""Needles in a haystack: values of keys, hidden in noise, in prose or among other needles."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import Literal
from uuid import UUID

from mezzo_core.eval.ruler.prose import NOISE, prose, sentences, words
from mezzo_core.eval.ruler.question import Question, Task

Kind = Literal["numbers", "words", "uuids"]
_DEPTHS = [round(100 * i / 39) for i in range(40)]
"""Where in the prose a needle may stand, in percent."""
_DRAWN: dict[Kind, Callable[[Random], str]] = {
    "numbers": lambda draw: str(draw.randint(10**6, 10**7 - 1)),
    "words": lambda draw: "-".join(draw.choices(words(), k=2)),
    "uuids": lambda draw: str(UUID(int=draw.getrandbits(128), version=4)),
}


@dataclass(frozen=True)
class _Needles:
    """One of the tasks: `Task.write` calls it.

    Attributes:
        haystack: what is around the needles. The size of a context counts sentences of noise, words
            of prose, or other needles.
        of_keys: what keys are.
        of_values: what values are.
        num_keys: keys with needles.
        num_values: values of each key, each in a needle of its own.
        num_asked: keys that are asked for.
    """

    haystack: Literal["noise", "prose", "needles"]
    of_keys: Kind = "words"
    of_values: Kind = "numbers"
    num_keys: int = 1
    num_values: int = 1
    num_asked: int = 1

    def __call__(self, draw: Random, size: int, length: int) -> Question:
        keys = self._different(draw, self.of_keys, self.num_keys)
        values = [self._different(draw, self.of_values, self.num_values) for _ in keys]
        needles = [
            self._needle(key, value) for key, its in zip(keys, values, strict=True) for value in its
        ]
        draw.shuffle(needles)
        context = self._context(draw, size, needles)
        asked = draw.sample(range(self.num_keys), self.num_asked)
        names = [keys[i] for i in asked]
        query = ", ".join(names[:-1]) + ", and " + names[-1] if names[1:] else names[0]
        is_one = self.num_asked * self.num_values == 1
        what = self.of_values.removesuffix("s") if is_one else self.of_values
        some, are_all, are = ("A", "is", "is") if is_one else ("Some", "are all", "are")
        prompt = (
            f"{some} special magic {what} {are} hidden within the following text. Make sure to "
            f"memorize it. I will quiz you about the {what} afterwards.\n{context}\n"
            f"What {are_all} the special magic {what} for {query} mentioned in the provided text? "
            f"The special magic {what} for {query} mentioned in the provided text {are}"
        )
        return Question(prompt, [value for i in asked for value in values[i]])

    def _needle(self, key: str, value: str) -> str:
        return f"One of the special magic {self.of_values} for {key} is: {value}."

    def _different(self, draw: Random, kind: Kind, count: int) -> list[str]:
        found: dict[str, None] = {}
        while len(found) < count:
            found[_DRAWN[kind](draw)] = None
        return list(found)

    def _context(self, draw: Random, size: int, needles: list[str]) -> str:
        if self.haystack == "prose":
            return self._in_prose(draw, size, needles)
        if self.haystack == "noise":
            lines = [NOISE] * size
        else:
            kinds = (self.of_keys, self.of_values)
            lines = [self._needle(*(_DRAWN[kind](draw) for kind in kinds)) for _ in range(size)]
        places = sorted(draw.sample(range(size), len(needles)), reverse=True)
        for place, needle in zip(places, needles, strict=True):
            lines.insert(place, needle)
        return "\n".join(lines)

    def _in_prose(self, draw: Random, size: int, needles: list[str]) -> str:
        text = prose()
        whole, rest = divmod(size, len(text))
        lines = sentences(" ".join([*text * whole, *text[:rest]]))
        depths = sorted(draw.sample(_DEPTHS, len(needles)))
        borders = [0, *(int(len(lines) * depth / 100) for depth in depths), len(lines)]
        parts = [" ".join(lines[begin:end]) for begin, end in pairwise(borders)]
        mixed = [part for pair in zip(parts, [*needles, ""], strict=True) for part in pair]
        return " ".join(part for part in mixed if part)


def _task(name: str, needles: _Needles) -> Task:
    return Task(f"ruler_niah_{name}", 128, 4 if needles.haystack == "noise" else 8, None, needles)


NEEDLES = (
    _task("single_1", _Needles("noise")),
    _task("single_2", _Needles("prose")),
    _task("single_3", _Needles("prose", of_values="uuids")),
    _task("multikey_1", _Needles("prose", num_keys=4)),
    _task("multikey_2", _Needles("needles")),
    _task("multikey_3", _Needles("needles", of_keys="uuids", of_values="uuids")),
    _task("multivalue", _Needles("prose", num_values=4)),
    _task("multiquery", _Needles("prose", num_keys=4, num_asked=4)),
)
