"""What a task of RULER asks, how long it is, and how an answer is scored."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import NamedTuple

from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError


class Question(NamedTuple):
    """A prompt, and all that its continuation should name."""

    prompt: str
    answers: Sequence[str]


@dataclass(frozen=True)
class Task:
    """Writes questions whose contexts have any length.

    Attributes:
        name: such as "ruler_vt".
        max_new_tokens: what a model may write as its answer.
        smallest: the smallest size of a context.
        largest: its largest size; None for no limit.
        write: writes a question from random numbers, the size of its context in units of the task
            (sentences, words), and the length in tokens that is asked for.
    """

    name: str
    max_new_tokens: int
    smallest: int
    largest: int | None
    write: Callable[[Random, int, int], Question]


def questions(
    task: Task, tokenizer: Tokenizer, length: int, num_questions: int, seed: int = 42
) -> Iterator[tuple[list[int], Question]]:
    """Yield questions and the tokens of their prompts.

    Each prompt with `max_new_tokens` new tokens takes at most `length` tokens. Question i does not
    depend on how many are asked for.

    Raises:
        UserError: if the length is too short for the task.
    """
    size = None
    for i in range(num_questions):
        name = f"{seed} {task.name} {length} {i}"
        size, tokens, question = fitted(task, tokenizer, length, name, size)
        yield tokens, question


def fitted(
    task: Task, tokenizer: Tokenizer, length: int, seed: str, size: int | None = None
) -> tuple[int, list[int], Question]:
    """Return a question of at most so many tokens, with its size and the tokens of its prompt.

    Args:
        task: writes it.
        tokenizer: of the model.
        length: tokens of the prompt and the answer together.
        seed: of the random numbers; the same ones are drawn for each size that is tried.
        size: is tried first, then smaller ones; None looks for the largest that fits.

    Raises:
        UserError: if the smallest is too long.
    """
    room = length - task.max_new_tokens

    def tried(size: int) -> tuple[list[int], Question]:
        question = task.write(Random(seed), size, length)
        return [*tokenizer.begin_tokens, *tokenizer.encode(question.prompt)], question

    if size is None:
        size = _largest(lambda size: len(tried(size)[0]) <= room, task)
    tokens, question = tried(size)
    while len(tokens) > room:
        if size == task.smallest:
            raise UserError(
                f"{task.name} needs {len(tokens) + task.max_new_tokens} tokens or more, got a "
                f"length of {length} (--seq-len)"
            )
        size = max(size - max(size // 64, 1), task.smallest)
        tokens, question = tried(size)
    return size, tokens, question


def _largest(fits: Callable[[int], bool], task: Task) -> int:
    """Return the largest size that fits, by doubling and then halving; the smallest if none."""
    low, high = task.smallest, task.smallest
    while fits(high):
        low = high
        if high == task.largest:
            return high
        high = 2 * high if task.largest is None else min(2 * high, task.largest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def score(text: str, answers: Sequence[str]) -> float:
    """Return the share of the answers that a text names, whatever their case, from 0 to 1."""
    text = re.sub(r"[\x00-\x1f]", "\n", text.strip()).strip().lower()
    return sum(answer.lower() in text for answer in answers) / len(answers)
