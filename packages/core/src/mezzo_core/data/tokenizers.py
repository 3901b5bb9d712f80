"""Text to tokens and back: bytes, tokenizers of the `tokenizers` library, SentencePiece.

All follow one rule: text never becomes a special token, and a special token decodes to nothing.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mezzo_core.errors import UserError
from mezzo_core.libraries import import_library, library_errors, panics_unprinted


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token that a text, its beginning or its end can have."""
        ...

    @property
    def eos_token(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """All tokens that end a text that a model writes, the end token among them."""
        ...

    @property
    def bos_token(self) -> int | None:
        """The token that models of this tokenizer may expect first; None if it has none."""
        ...

    @property
    def begin_tokens(self) -> tuple[int, ...]:
        """What documents and prompts begin with: nothing, or the `bos_token` if that is asked."""
        ...

    @property
    def identity(self) -> str:
        """Name that differs if the tokens of a text may differ; the token cache is keyed by it."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with no token added at either end."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text as an integer array, computed on all cores if possible."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; broken UTF-8 becomes U+FFFD.

        Special tokens decode to nothing, and so do those beyond the vocabulary.
        """
        ...

    def token_bytes(self, token: int, *, first: bool = False) -> int:
        """Return how many bytes of UTF-8 a token stands for, which may be parts of a character.

        Some tokenizers put a space before a text, which does not count in its `first` token.
        """
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    eos_token = 256
    stop_tokens = (256,)
    bos_token = None
    begin_tokens: tuple[int, ...] = ()
    identity = "byte"

    def encode(self, text: str) -> list[int]:
        """Return the UTF-8 bytes."""
        return list(text.encode("utf-8"))

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the UTF-8 bytes of each text."""
        return [np.frombuffer(text.encode("utf-8"), dtype=np.uint8) for text in texts]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the bytes."""
        return bytes(token for token in tokens if token < 256).decode("utf-8", errors="replace")

    def token_bytes(self, token: int, *, first: bool = False) -> int:
        """Return one, or zero for the end of a document."""
        return int(token < 256)


class HFTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(
        self,
        backend: Any,
        eos_token: int,
        identity: str,
        name: str,
        stops: Sequence[int] = (),
        pad_token: int | None = None,
    ) -> None:
        """Take a loaded tokenizer.

        Args:
            backend: the library's tokenizer, which is modified.
            eos_token: the token that ends a document.
            identity: see `Tokenizer`.
            name: its name in messages.
            stops: other tokens that end what a model writes.
            pad_token: its own token for padding, which only transformers uses.

        Raises:
            UserError: if two of its tokens share a number, or it does not have the end token.
        """
        with library_errors(f"{name} cannot be used"), panics_unprinted():
            backend.no_padding()
            backend.no_truncation()
            template = backend.encode("").ids  # what is put around a text
            backend.post_processor = None  # no token is added at either end
            backend.encode_special_tokens = True  # "</s>" in a text is text
            model = backend.model
            if hasattr(model, "dropout"):
                model.dropout = None  # else the same text could get other tokens each time
            vocabulary = backend.get_vocab(with_added_tokens=True)
            added = backend.get_added_tokens_decoder()
            self._may_drop = _may_drop(backend, vocabulary)
            # A byte-level space before a text, which decoding keeps.
            self._adds_space = "".join(_pieces(backend, "a")).startswith("Ġ")
        numbers = set(vocabulary.values())
        if len(numbers) < len(vocabulary):
            raise UserError(f"{name} gives two tokens the same number")
        if eos_token not in numbers:
            raise UserError(f"{name} has no token {eos_token!r} to end a document")
        self.backend, self._name = backend, name
        self._known: set[str] = set()  # characters that are not dropped
        self.eos_token = eos_token
        self.stop_tokens = tuple(dict.fromkeys((eos_token, *stops)))
        self.bos_token = template[0] if template and template[0] != eos_token else None
        self.begin_tokens: tuple[int, ...] = ()
        self.identity = identity
        # Texts hold no special tokens, such as that for padding, except the one for unknown words.
        special = {number for number, token in added.items() if token.special}
        special.discard(vocabulary.get(getattr(model, "unk_token", None)))
        self.vocab_size: int = 1 + max(numbers - special | {eos_token, self.bos_token or 0})
        if pad_token is None or pad_token >= self.vocab_size:  # a model has no embedding of it
            pad_token = eos_token
        self.pad_token = pad_token

    def encode(self, text: str) -> list[int]:
        """Return the tokens, without those that the tokenizer's template would add.

        Raises:
            UserError: if the vocabulary has no token for some of the text.
        """
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, computed in parallel.

        Raises:
            UserError: if the vocabulary has no token for some of the text.
        """
        with library_errors(f"{self._name} cannot encode the text"):
            if self._may_drop:
                self._refuse_dropped(set().union(*texts) - self._known)
            encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return self.backend.decode(list(tokens), skip_special_tokens=True)

    def token_bytes(self, token: int, *, first: bool = False) -> int:
        """Return the bytes of the token's text.

        This is one too few for the first token of a text that begins with a space, if the tokenizer
        puts a space before texts: it then adds none, and the token does not show that.
        """
        once, twice = (self.decode([token] * n) for n in (1, 2))
        piece = self.backend.id_to_token(token) or ""
        added = first and self._adds_space and piece.startswith("Ġ")
        if "\ufffd" in once:  # a part of a character: a byte-level piece has a letter for each byte
            return 1 if piece.startswith("<0x") else len(piece) - added
        # Decoding may drop a space before the first token.
        text = once if first else twice[len(once) :]
        return len((text.removeprefix(" ") if added else text).encode("utf-8"))

    def _refuse_dropped(self, characters: set[str]) -> None:
        """Refuse new characters without a token, which the library would silently drop."""
        model = self.backend.model
        for character in characters:
            for piece in _pieces(self.backend, character):
                if not all(map(model.tokenize, piece)):
                    raise UserError(
                        f"{self._name} has no token for {character!r}, and none for what it does "
                        "not know: that text would be left out"
                    )
            self._known.add(character)


def _may_drop(backend: Any, vocabulary: dict[str, int]) -> bool:
    """Tell whether the library may silently drop text that the vocabulary lacks.

    Only byte pair encoding without an unknown token does so; the library's other models raise an
    error. Byte-level encoding drops nothing if the vocabulary has all bytes.
    """
    tokenizers = import_library("tokenizers", "train")
    model = backend.model
    if not isinstance(model, tokenizers.models.BPE) or model.unk_token or model.byte_fallback:
        return False
    letters = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    in_bytes = set(letters).issuperset("".join(_pieces(backend, "é日")))
    return not (in_bytes and vocabulary.keys() >= set(letters))


def _pieces(backend: Any, text: str) -> list[str]:
    """Return the normalized, pre-tokenized pieces of a text: the input of a tokenizer's model."""
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    if backend.pre_tokenizer is None:
        return [text]
    return [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]


class SentencePieceTokenizer:
    """A SentencePiece model."""

    def __init__(self, processor: Any, identity: str, name: str) -> None:
        """Take the library's model; `name` is for messages.

        Raises:
            UserError: if it has no token to end a document.
        """
        self.processor, self.name = processor, name
        self.identity = identity
        self.eos_token: int = processor.eos_id()
        self.stop_tokens = (self.eos_token,)
        self.bos_token = processor.bos_id() if processor.bos_id() >= 0 else None
        self.begin_tokens: tuple[int, ...] = ()
        self.vocab_size: int = processor.vocab_size()
        if not 0 <= self.eos_token < self.vocab_size:
            raise UserError(f"{name} has no </s> to end a document")

    def encode(self, text: str) -> list[int]:
        """Return the tokens, with no <s> or </s>.

        Raises:
            UserError: if the library refuses the text.
        """
        return self.encode_batch([text])[0].tolist()

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, computed in parallel.

        Raises:
            UserError: if the library refuses a text.
        """
        with library_errors(f"{self.name} cannot encode the text"):
            encoded = self.processor.encode(list(texts))
        return [np.array(tokens, dtype=np.uint32) for tokens in encoded]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens; those beyond the vocabulary are ignored."""
        return self.processor.decode([int(token) for token in tokens if token < self.vocab_size])

    def token_bytes(self, token: int, *, first: bool = False) -> int:
        """Return the bytes of the token's text; parts of a character are single bytes."""
        if token >= self.vocab_size or self.processor.is_control(token):
            return 0
        if self.processor.is_byte(token):
            return 1
        text = self.processor.id_to_piece(token).replace("▁", " ")
        return len((self.decode([token]) if first else text).encode("utf-8"))


def keeps_line_breaks(tokenizer: Tokenizer) -> bool:
    """Tell whether a line break comes back from its tokens, or is refused for having none.

    SentencePiece models that normalize (its default, T5's) turn it into a space.
    """
    try:
        return "\n" in tokenizer.decode(tokenizer.encode("\n"))
    except UserError:
        return True
