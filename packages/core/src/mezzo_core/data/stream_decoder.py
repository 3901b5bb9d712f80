"""Turns the tokens of a model into text as they come."""

from collections.abc import Sequence

from mezzo_core.data.tokenizers import Tokenizer

_BROKEN = "\ufffd"
# How many tokens wait for the end of a character. It has four at most, but text may hold U+FFFD.
_LONGEST = 64


class StreamDecoder:
    """Turns tokens into text one at a time.

    A character whose bytes are not complete yet is held back. If all tokens together are valid
    UTF-8, the results of all `push` calls and the final `flush`, joined, are their text.

    The `tokenizers` library has a stream decoder too, which raises an error where bytes that follow
    a complete character make none, as an untrained model writes them.
    """

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int] = ()) -> None:
        """Begin a text.

        Args:
            tokenizer: made the tokens.
            before: the tokens of a prompt, whose text is not returned. Without them, SentencePiece
                would drop the space before the first word of a continuation.
        """
        self._tokenizer = tokenizer
        # Tokens whose text was returned: the newest that have any. The first of them begins a
        # character, since a run of byte tokens decodes to a text only if all of it is UTF-8.
        self._done = list(before)
        self._waiting: list[int] = []

    def push(self, token: int | None) -> str:
        """Take one token; return the text that is now complete, which may be empty.

        None is no text, and neither is a token beyond the vocabulary: the model may have more.
        """
        if token is None or token >= self._tokenizer.vocab_size:
            return ""
        self._waiting.append(token)
        new = self._new()
        if new.endswith(_BROKEN) and len(self._waiting) < _LONGEST:
            return ""
        if new:
            self._done = self._waiting
        elif self._tokenizer.token_bytes(token):
            # This is the space that SentencePiece drops before a text; it keeps that of the next.
            self._done += self._waiting
        self._waiting = []
        return new

    def flush(self) -> str:
        """Return the text held back, with broken characters as U+FFFD, and start over."""
        rest = self._new()
        self._done, self._waiting = [], []
        return rest

    def _new(self) -> str:
        """Return the text of the waiting tokens, as it is after the tokens before them."""
        done = self._tokenizer.decode(self._done)
        whole = self._tokenizer.decode([*self._done, *self._waiting])
        if whole.startswith(done):
            return whole[len(done) :]
        # Broken bytes have spoilt the character before them, which was already returned.
        return self._tokenizer.decode(self._waiting)
