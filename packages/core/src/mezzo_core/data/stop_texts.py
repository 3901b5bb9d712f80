"""Ends a continuation once it contains one of the stop texts."""

from collections.abc import Callable, Sequence

from mezzo_core.data.continuations import Continuations
from mezzo_core.data.tokenizers import Tokenizer

_SILENT = 16
"""How many tokens without text, such as special ones, may stand between those of a stop text."""


def stop_texts(tokenizer: Tokenizer, texts: Sequence[str]) -> Callable[[Sequence[int]], bool]:
    """Return a function for `generate(stop=...)` that ends after one of the texts.

    A text is found however it is cut into tokens, and also where it begins or ends inside one;
    that token is kept whole.

    Raises:
        ValueError: if there is no text, or one is empty.
    """
    if isinstance(texts, str) or not texts or not all(texts):
        raise ValueError(f"a text to stop at must have at least one character, got {texts!r}")
    longest = max(len(text.encode()) for text in texts) + _SILENT
    continuations = Continuations(tokenizer)

    def stop(tokens: Sequence[int]) -> bool:
        # Each token with text has a byte or more: the newest `longest` tokens hold any stop text.
        written = continuations.decode(tokens[-longest:])
        return any(text in written for text in texts)

    return stop
