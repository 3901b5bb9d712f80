"""Text to tokens and back: bytes, Hugging Face tokenizers, GPT-2's files, SentencePiece.

All follow one rule: text never becomes a special token, and a special token decodes to nothing.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from reprlib import repr as shorten
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mezzo_core.data.find import existing_path
from mezzo_core.data.hub import HUB_PREFIX, load_hub_tokenizer
from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.libraries import import_library, library_errors, panics_unprinted

# Usual names of the token that ends a document, tried where no file beside the tokenizer names it.
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
# Names of the vocabulary and merges files: GPT-2's, and those of later tokenizers.
BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token of a text, its beginning and its end."""
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
        """Return the text. Special tokens decode to nothing, broken UTF-8 to U+FFFD."""
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
        self, backend: Any, eos_token: int, identity: str, name: str, stops: Sequence[int] = ()
    ) -> None:
        """Take a loaded tokenizer.

        Args:
            backend: the library's tokenizer, which is modified.
            eos_token: the token that ends a document.
            identity: see `Tokenizer`.
            name: its name in messages.
            stops: other tokens that end what a model writes.

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
        numbers = set(vocabulary.values())
        if len(numbers) < len(vocabulary):
            raise UserError(f"{name} gives two tokens the same number")
        if eos_token not in numbers:
            raise UserError(f"{name} has no token {eos_token!r} to end a document")
        self._backend, self._name = backend, name
        self._known: set[str] = set()  # characters that are not dropped
        self.eos_token = eos_token
        self.stop_tokens = tuple(dict.fromkeys((eos_token, *stops)))
        self.bos_token = template[0] if template and template[0] != eos_token else None
        self.begin_tokens: tuple[int, ...] = ()
        self.identity = identity
        # A special token that was added, such as one for padding, is no token of a text, but what
        # stands for unknown words is.
        special = {number for number, token in added.items() if token.special}
        special.discard(vocabulary.get(getattr(model, "unk_token", None)))
        self.vocab_size: int = 1 + max(numbers - special | {eos_token, self.bos_token or 0})

    @property
    def backend(self) -> Any:
        """The library's tokenizer."""
        return self._backend

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
            encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return self._backend.decode(list(tokens), skip_special_tokens=True)

    def token_bytes(self, token: int, *, first: bool = False) -> int:
        """Return the bytes of the token's text."""
        piece = self._backend.id_to_token(token) or ""
        # Of a part of a character, a byte-level piece has a letter for each byte.
        broken = 1 if piece.startswith("<0x") else len(piece)
        return _text_bytes(self, token, first, broken)

    def _refuse_dropped(self, characters: set[str]) -> None:
        """Refuse new characters without a token, which the library would silently drop."""
        model = self._backend.model
        for character in characters:
            for piece in _pieces(self._backend, character):
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
        """Take a loaded model.

        Args:
            processor: the library's model.
            identity: see `Tokenizer`.
            name: its name in messages.

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
        return _text_bytes(self, token, first, 1)


def _text_bytes(tokenizer: Tokenizer, token: int, first: bool, broken: int) -> int:
    """Return the bytes of a token's text, `broken` if it ends or begins within a character."""
    once, twice = (tokenizer.decode([token] * n) for n in (1, 2))
    if "\ufffd" in once:
        return broken
    # A second token has all of its text: decoding drops a space before the first.
    text = once if first else twice[len(once) :]
    return len(text.encode("utf-8"))


def keeps_line_breaks(tokenizer: Tokenizer) -> bool:
    """Tell whether a line break comes back from its tokens, or is refused for having none.

    SentencePiece models that normalize (its default, T5's) turn it into a space.
    """
    try:
        return "\n" in tokenizer.decode(tokenizer.encode("\n"))
    except UserError:
        return True


def load_tokenizer(name: str, *, add_bos: bool = False) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: "byte"; a tokenizer.json; a folder with tokenizer.json, with encoder.json and
            vocab.bpe (GPT-2) or with vocab.json and merges.txt; a SentencePiece .model; or
            "hub:OWNER/NAME", a model of the Hugging Face hub.
        add_bos: let documents and prompts begin with the tokenizer's `bos_token`.

    Raises:
        UserError: if there is no such file, it is not a tokenizer, its end token is unknown, or it
            has no `bos_token` and one is to be added.
    """
    tokenizer = _load(name)
    if add_bos:
        if tokenizer.bos_token is None:
            raise UserError(f"add_bos: the tokenizer {name!r} has no token to begin a document")
        tokenizer.begin_tokens = (tokenizer.bos_token,)
        tokenizer.identity += f" begin {tokenizer.bos_token}"
    return tokenizer


def _load(name: str) -> ByteTokenizer | HFTokenizer | SentencePieceTokenizer:
    if name == "byte":
        return ByteTokenizer()
    if name.startswith(HUB_PREFIX):
        return _load_hub(name)
    path = existing_path(name)
    if path is not None and path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _load_json(path / "tokenizer.json")
        for vocab, merges in BPE_FILES:
            if (path / vocab).is_file() and (path / merges).is_file():
                return _load_bpe(path / vocab, path / merges)
    elif path is not None and path.is_file() and path.suffix in (".json", ".model"):
        return _load_json(path) if path.suffix == ".json" else _load_sentencepiece(path)
    raise UserError(
        f'no tokenizer at {name!r}; allowed are "byte", a tokenizer.json, a folder with '
        f"{' or '.join(' and '.join(pair) for pair in BPE_FILES)}, a SentencePiece .model, "
        'or "hub:NAME"'
    )


def _checksum(*paths: Path) -> str:
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in paths)).hexdigest()


def _load_json(path: Path) -> HFTokenizer:
    tokenizers = import_library("tokenizers", "train")
    with library_errors(f"{path} is no tokenizer of the tokenizers library"), panics_unprinted():
        backend = tokenizers.Tokenizer.from_file(str(path))
        checksum = _checksum(path)
    named = _named_end_token(path)
    names = END_TOKENS if named is None else (named,)
    found = [token for name in names if (token := backend.token_to_id(name)) is not None]
    if not found:
        raise UserError(
            f"{path} has no token {' or '.join(names)} to end a document; "
            'name one in tokenizer_config.json beside it: {"eos_token": "..."}'
        )
    stops = _named_stops(path.with_name("generation_config.json"))
    return HFTokenizer(backend, found[0], f"json {checksum} {found[0]}", str(path), stops)


def _named_end_token(path: Path) -> str | None:
    """Return the end token that a file beside a tokenizer.json names; None if none does."""
    for file in map(path.with_name, ("tokenizer_config.json", "special_tokens_map.json")):
        token = _read_beside(file).get("eos_token")
        name = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(name, str) or not name:
                raise UserError(
                    f'{file}: "eos_token" must be text, or {{"content": text}}, got '
                    f"{shorten(token)}"
                )
            return name
    return None


def _named_stops(file: Path) -> tuple[int, ...]:
    """Return the tokens that end what a model writes, several for Llama 3."""
    told = _read_beside(file).get("eos_token_id")
    stops = told if isinstance(told, list) else [] if told is None else [told]
    if not all(type(token) is int and token >= 0 for token in stops):
        raise UserError(f'{file}: "eos_token_id" must be a token or several, got {shorten(told)}')
    return tuple(stops)


def _read_beside(file: Path) -> dict[str, Any]:
    """Read a JSON file beside a tokenizer; without the file nothing is told."""
    if file.is_file():
        return read_json(file)
    if file.exists():
        raise UserError(f"{file} must be a file")
    return {}


def _load_bpe(vocab: Path, merges: Path) -> HFTokenizer:
    tokenizers = import_library("tokenizers", "train")
    name = f"{vocab} with {merges.name}"
    numbers = read_json(vocab)
    # The library skips a value that is not a number and truncates one that is too large.
    if not all(type(number) is int and 0 <= number < 2**32 for number in numbers.values()):
        raise UserError(f"{vocab} must hold a number from 0 to 2^32 - 1 for each token")
    with library_errors(f"{name} is no byte-level BPE"), panics_unprinted():
        backend = tokenizers.Tokenizer(tokenizers.models.BPE.from_file(str(vocab), str(merges)))
        backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = tokenizers.decoders.ByteLevel()
        checksum = _checksum(vocab, merges)
    end = next((end for end in END_TOKENS if end in numbers), None)
    if end is None:
        raise UserError(f"{vocab} has no token {' or '.join(END_TOKENS)} to end a document")
    backend.add_special_tokens([end])
    return HFTokenizer(backend, backend.token_to_id(end), f"bpe {checksum}", name)


def _load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    sentencepiece = import_library("sentencepiece", "train")
    with library_errors(f"{path} is no SentencePiece model"):
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        checksum = _checksum(path)
    return SentencePieceTokenizer(processor, f"sentencepiece {checksum}", str(path))


def _load_hub(source: str) -> HFTokenizer:
    backend, end, stops = load_hub_tokenizer(source)
    checksum = hashlib.sha256(backend.to_str().encode("utf-8")).hexdigest()
    return HFTokenizer(backend, end, f"json {checksum} {end}", source, stops)
