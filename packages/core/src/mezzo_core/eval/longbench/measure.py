"""Measures a model on questions of LongBench, which are in a file."""

import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mezzo_core.data.corpora import parse_record, read_lines
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError, nearest
from mezzo_core.eval.longbench.scores import SCORES
from mezzo_core.nn.generate import generate
from mezzo_core.nn.lm import LM

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]


class Task(NamedTuple):
    """How a task asks, and how its answers are scored."""

    score: str
    max_new_tokens: int
    prompt: str
    first_line: bool = False
    """Whether the answer ends with its line."""


class Question(NamedTuple):
    """A question, by the names of LongBench's fields."""

    dataset: str
    input: str
    context: str
    answers: list[str]
    all_classes: list[str] | None = None


class Found(NamedTuple):
    """What was found.

    Attributes:
        score: in percent: the mean over questions of that of the best of the right answers.
        length: the most tokens of a prompt and its answer.
        questions: how many were asked.
        truncated: of how many the middle of the prompt was left out.
    """

    score: float
    length: int
    questions: int
    truncated: int


_TABLE = Path(__file__).with_name("tasks.toml")
TASKS = {name: Task(**its) for name, its in tomllib.loads(_TABLE.read_text("utf-8")).items()}
"""The English tasks, by LongBench's names."""


def read_questions(path: Path) -> list[Question]:
    """Read a .jsonl file of LongBench; it may have questions of several tasks.

    Raises:
        UserError: if a line is no question of one of `TASKS`, or there is none.
    """
    questions = [_parse(line, where) for where, line in read_lines(path)]
    if not questions:
        raise UserError(f"{path}: there is no question")
    return questions


def _parse(line: str, where: str) -> Question:
    record = parse_record(line, where)
    if not isinstance(record, dict):
        raise UserError(f"{where}: must be an object")
    values: list[Any] = [record.get(name) for name in Question._fields]
    *texts, answers, classes = values
    if not all(isinstance(text, str) for text in texts):
        raise UserError(f'{where}: "dataset", "input" and "context" must be texts')
    lists = (answers, [] if classes is None else classes)
    if not answers or not all(
        isinstance(each, list) and all(isinstance(text, str) for text in each) for each in lists
    ):
        raise UserError(f'{where}: "answers" must be a list of texts, "all_classes" too or null')
    if texts[0] not in TASKS:
        raise UserError(f"{where}: there is no task {texts[0]!r}{nearest(texts[0], TASKS)}")
    return Question(*values)


def measure_longbench(
    model: LM,
    tokenizer: Tokenizer,
    questions: Sequence[Question],
    *,
    length: int = 4096,
    batch_size: int = 8,
    segment_tokens: int | None = None,
    repetition_penalty: float = 1.0,
) -> Found:
    """Ask a model questions of one task, and return its score; it answers greedily.

    Args:
        model: the model, on its device and in its dtype.
        tokenizer: the model's.
        questions: of one task.
        length: the most tokens of a prompt and its answer together; of a longer prompt the first
            and the last half of what fits are read.
        batch_size: questions at a time.
        segment_tokens: tokens of a prompt at a time, for bounded memory; None for all.
        repetition_penalty: see `generate`; RAT's authors have 1.2 for summaries.

    Raises:
        UserError: if the length leaves no room for a prompt.
    """
    name = questions[0].dataset
    check_length(length, [name], tokenizer)
    task = TASKS[name]
    room = length - task.max_new_tokens - len(tokenizer.begin_tokens)
    whole = [tokenizer.encode(task.prompt.format(**each._asdict())) for each in questions]
    half = room // 2
    cut = [each if len(each) <= room else each[:half] + each[-half:] for each in whole]
    found = generate(
        model,
        [[*tokenizer.begin_tokens, *tokens] for tokens in cut],
        max_new_tokens=task.max_new_tokens,
        stop_tokens=[token for token in tokenizer.stop_tokens if token < model.vocab_size],
        stop=_after_a_line(tokenizer) if name == "samsum" else None,
        prefill_tokens=segment_tokens,
        num_rows=batch_size,
        repetition_penalty=repetition_penalty,
    )
    scores = [
        _score(task, tokenizer.decode(tokens), each)
        for tokens, each in zip(found, questions, strict=True)
    ]
    truncated = sum(len(tokens) > room for tokens in whole)
    return Found(100 * sum(scores) / len(scores), length, len(scores), truncated)


def check_length(length: int, names: Collection[str], tokenizer: Tokenizer) -> None:
    """Raise a UserError if a length leaves no room for the prompts of some tasks."""
    fewest = {name: TASKS[name].max_new_tokens + len(tokenizer.begin_tokens) + 2 for name in names}
    if short := [name for name in names if fewest[name] > length]:
        least = max(fewest[name] for name in short)
        raise UserError(f"a length (--seq-len) of {least} or more is needed by {', '.join(short)}")


def _after_a_line(tokenizer: Tokenizer) -> Callable[[Sequence[int]], bool]:
    """Return what ends an answer at the end of its first line that is not empty."""
    return lambda tokens: "\n" in tokenizer.decode(tokens).lstrip("\n")


def _score(task: Task, written: str, question: Question) -> float:
    if task.first_line:
        written = written.lstrip("\n").split("\n")[0]
    score, classes = SCORES[task.score], question.all_classes or ()
    return max(score(written, answer, classes) for answer in question.answers)
