"""Measures a model on a task of RULER."""

from typing import NamedTuple

from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.eval.ruler.question import Task, questions, score
from mezzo_core.nn.generate import generate
from mezzo_core.nn.lm import LM

LENGTH = 4096
"""The most tokens of a prompt and its answer, if nothing else is said."""


class Found(NamedTuple):
    """What was found.

    Attributes:
        score: in percent: the mean over questions of the share of answers that were named.
        length: the most tokens of a prompt and its answer.
        questions: how many were asked.
        mean_length: tokens of a prompt and its answer in the mean.
    """

    score: float
    length: int
    questions: int
    mean_length: float


def measure_ruler(
    model: LM,
    tokenizer: Tokenizer,
    task: Task,
    *,
    length: int = LENGTH,
    num_questions: int = 500,
    seed: int = 42,
    batch_size: int = 8,
    segment_tokens: int | None = None,
) -> Found:
    """Ask a model the questions of a task, and return its score; it answers greedily.

    Args:
        model: the model, on its device and in its dtype.
        tokenizer: the model's.
        task: one of `TASKS`.
        length: the most tokens of a prompt and its answer together.
        num_questions: how many are asked.
        seed: of the questions.
        batch_size: questions at a time.
        segment_tokens: tokens of a prompt at a time, for bounded memory; None for all.

    Raises:
        UserError: if the length is too short for the task.
    """
    prompts, asked = zip(*questions(task, tokenizer, length, num_questions, seed), strict=True)
    found = generate(
        model,
        prompts,
        max_new_tokens=task.max_new_tokens,
        stop_tokens=[token for token in tokenizer.stop_tokens if token < model.vocab_size],
        prefill_tokens=segment_tokens,
        num_rows=batch_size,
    )
    scores = [
        score(tokenizer.decode(tokens), question.answers)
        for tokens, question in zip(found, asked, strict=True)
    ]
    mean_length = sum(map(len, prompts)) / len(prompts) + task.max_new_tokens
    return Found(100 * sum(scores) / len(scores), length, len(scores), mean_length)
