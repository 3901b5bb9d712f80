"""Examples to learn answers from: a prompt and its answer, or the messages of a chat."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mezzo_core.data.continuations import Continuations
from mezzo_core.data.corpora import parse_record, read_lines
from mezzo_core.data.find import find_files, format_of
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError

ANSWERS = ("answer", "completion")
"""Names that the answer to a prompt can have."""
_ASSISTANT = "assistant"
ROLES = ("system", "user", _ASSISTANT, "tool")
"""Who can have written a message; what the assistant wrote is the answer."""


class Part(NamedTuple):
    """A piece of an example's text, and whether it is learned."""

    text: str
    is_answer: bool


def read_examples(source: str) -> Iterator[tuple[str, str]]:
    """Yield the lines of .jsonl files (a file, a folder or a glob), each after words for its place.

    Raises:
        UserError: if there is no such file, one is of another format, or one cannot be read.
    """
    for path in find_files(source):
        if format_of(path) != ".jsonl":
            raise UserError(f"{path}: examples must be in .jsonl files, one a line")
        yield from read_lines(Path(path))


def parse_example(line: str, where: str) -> list[Part]:
    """Return the parts of an example.

    It is `{"prompt": ..., "answer": ...}`, with "completion" as another name of the answer, or
    `{"messages": [{"role": ..., "content": ...}, ...]}`. Other fields are not read. A message
    becomes `ROLE:`, a line break and its content; what the assistant wrote is an answer.

    Raises:
        UserError: if it is no such example; the message begins with `where`.
    """
    record = parse_record(line, where)
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, got {type(record).__name__}")
    if "messages" in record:
        return _chat(record["messages"], where)
    names = [name for name in ANSWERS if name in record]
    if "prompt" not in record or len(names) != 1:
        found = ", ".join(map(repr, list(record)[:10])) or "none"
        raise UserError(
            f'{where}: an example needs "prompt" and "answer" (or "completion"), or "messages"; '
            f"its fields are {found}"
        )
    prompt, answer = (_text(record[name], f'{where}: "{name}"') for name in ("prompt", names[0]))
    return [Part(prompt, False), Part(answer, True)]


def encode_example(parts: list[Part], continuations: Continuations) -> tuple[list[int], list[bool]]:
    """Return an example's tokens, and which of them are learned: answers, each with an end token.

    Tokens are those of generation: what stands before an answer is one text, as a prompt is, and
    the answer is a text that follows it.
    """
    tokenizer = continuations.tokenizer
    tokens = list(tokenizer.begin_tokens)
    learned = [False] * len(tokens)
    for part in parts:
        if part.is_answer:
            new = [*continuations.encode(part.text), tokenizer.eos_token]
        else:
            new = tokenizer.encode(part.text)
        tokens += new
        learned += [part.is_answer] * len(new)
    return tokens, learned


def encode_chat(messages: list[dict[str, str]], tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a chat in which the assistant writes next, as in its training.

    Args:
        messages: `{"role": ..., "content": ...}` each, from the first on.
        tokenizer: the model's.

    Raises:
        UserError: if they are no messages.
    """
    parts = _turns(messages, "a chat", ending=f"{_ASSISTANT}:\n")
    return encode_example(parts, Continuations(tokenizer))[0]


def _chat(messages: Any, where: str) -> list[Part]:
    parts = _turns(messages, where)
    if not any(part.is_answer for part in parts):
        raise UserError(f'{where}: no message is the "assistant"\'s, so there is nothing to learn')
    return parts


def _turns(messages: Any, where: str, ending: str = "") -> list[Part]:
    """Return the assistant's messages, and what stands before each; at last what follows them."""
    if not isinstance(messages, list) or not messages:
        raise UserError(f'{where}: "messages" must be a list with at least one message')
    parts, said = [], ""
    for i, message in enumerate(messages):
        name = f"messages[{i}]"
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise UserError(f'{where}: {name} must have a "role" of {", ".join(ROLES)}')
        role, content = message["role"], message.get("content")
        text = _text(content, f'{where}: "content" of {name}')
        if role == _ASSISTANT:
            parts += [Part(f"{said}{role}:\n", False), Part(text, True)]
            said = ""
        else:
            said += f"{role}:\n{text}\n"
    said += ending
    return [*parts, Part(said, False)] if said else parts


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value:
        got = "an empty one" if value == "" else type(value).__name__
        raise UserError(f"{name} must be a text that is not empty, got {got}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise UserError(f"{name} is not Unicode: {error.reason}") from error
    return value
