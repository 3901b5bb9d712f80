"""Variable tracking: which variables have a value, by a chain of assignments in noise."""

from itertools import pairwise
from random import Random
from string import ascii_uppercase

from mezzo_core.eval.ruler.prose import NOISE
from mezzo_core.eval.ruler.question import Question, Task

_HOPS = 4
_EXAMPLE_SIZE = 10
"""Sentences of noise around the example that comes before the question."""


def _write(draw: Random, size: int, length: int) -> Question:
    """Write a solved example and a question; the size counts sentences of noise."""
    example, solved = _asked(draw, _EXAMPLE_SIZE, letters=3)
    prompt, names = _asked(draw, size, letters=5)
    return Question(f"{example} {' '.join(solved)}\n\n{prompt}", names)


def _asked(draw: Random, size: int, letters: int) -> tuple[str, list[str]]:
    """Return a question and the variables that have the value that it asks for."""
    found: dict[str, None] = {}
    while len(found) < _HOPS + 1:
        found["".join(draw.choices(ascii_uppercase, k=letters))] = None
    names = list(found)
    value = draw.randrange(10_000, 99_999)
    chain = [f"VAR {names[0]} = {value}"]
    chain += [f"VAR {new} = VAR {old} " for old, new in pairwise(names)]
    lines = [f"{NOISE}\n"] * size
    for i, place in enumerate(sorted(draw.sample(range(size), len(chain)))):
        lines.insert(place + i, chain[i])
    context = " ".join(lines).replace(". \n", ".\n")
    prompt = (
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
        f"{context}\nQuestion: Find all variables that are assigned the value {value} in the text "
        "above. Answer: According to the chain(s) of variable assignment in the text above, "
        # "assgined" is the benchmark's own spelling: its prompts are kept as they are.
        f"{len(names)} variables are assgined the value {value}, they are: "
    )
    return prompt, names


CHAINS = Task("ruler_vt", 30, _HOPS + 1, None, _write)
