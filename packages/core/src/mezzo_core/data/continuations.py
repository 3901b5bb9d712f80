"""Encodes and decodes texts that follow others, as answers follow prompts."""

from collections.abc import Sequence

from mezzo_core.data.tokenizers import Tokenizer


class Continuations:
    """Encodes and decodes texts that follow others.

    SentencePiece puts a space before the first word of a text, and drops one from what it decodes.
    In the middle of a text neither is wanted.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        # Decoding drops nothing after a word, so a word is put before what is decoded.
        every = ([token] for token in range(tokenizer.vocab_size))
        self._before = next((word for word in every if tokenizer.decode(word).isalnum()), [])
        self._left_out = len(tokenizer.decode(self._before))

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens that follow others."""
        return self.tokenizer.decode([*self._before, *tokens])[self._left_out :]

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text that follows another, without a space before it.

        A tokenizer that changes texts in other ways gives the tokens that it gives a text alone.
        """
        alone = self.tokenizer.encode(text)
        if self.decode(alone) == text:
            return alone
        # The tokenizer adds its space before the line break, and no token joins that and a word.
        line_break = self.tokenizer.encode("\n")
        behind = self.tokenizer.encode(f"\n{text}")
        tokens = behind[len(line_break) :]
        fits = behind[: len(line_break)] == line_break and self.decode(tokens) == text
        return tokens if fits else alone
