"""Text to tokens and back: bytes, Hugging Face tokenizers, GPT-2's files, SentencePiece.

One rule for all: text never turns into a special token, and special tokens decode to nothing.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mezzo_core.data.hub import HUB_PREFIX, load_hub_tokenizer
from mezzo_core.data.libraries import import_library
from mezzo_core.errors import UserError

# What tokenizers call the token that ends a document, when nothing beside them says so.
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
# GPT-2's names for vocabulary and merges, and those that later tokenizers gave the same files.
BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))
_BROKEN = "\ufffd"
# A character is at most four bytes: with three missing a byte tokenizer holds back this many.
_HELD_BACK = 3
# Tokens kept as context: a SentencePiece space and a character's bytes need those before them.
_CONTEXT = 8
_LONGEST = 64


class Tokenizer(Protocol):
    """Text to tokens and back."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest token."""
        ...

    @property
    def eos_token(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def identity(self) -> str:
        """A name that differs when the tokens of a text may differ; it keys the packed cache."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with no token added at either end."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text as an integer array, using every core where it can."""
        ...

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text; special tokens are nothing, broken UTF-8 is U+FFFD."""
        ...


class ByteTokenizer:
    """The 256 bytes of UTF-8, and 256 for the end of a document."""

    vocab_size = 257
    eos_token = 256
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


class HFTokenizer:
    """A tokenizer of the `tokenizers` library."""

    def __init__(self, backend: Any, eos_token: int, identity: str) -> None:
        backend.no_padding()
        backend.no_truncation()
        backend.encode_special_tokens = True  # "</s>" in a text is text
        self._backend = backend
        self.eos_token = eos_token
        self.identity = identity
        self.vocab_size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str) -> list[int]:
        """Return the tokens, without those that a template would add."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, computed in parallel."""
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return self._backend.decode(list(tokens), skip_special_tokens=True)


class SentencePieceTokenizer:
    """A SentencePiece model."""

    def __init__(self, processor: Any, identity: str) -> None:
        self._processor = processor
        self.identity = identity
        self.eos_token: int = processor.eos_id()
        self.vocab_size: int = processor.vocab_size()

    def encode(self, text: str) -> list[int]:
        """Return the tokens, with no <s> or </s>."""
        return self._processor.encode(text)

    def encode_batch(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Return the tokens of each text, computed in parallel."""
        return [np.array(tokens, dtype=np.uint32) for tokens in self._processor.encode(list(texts))]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of the tokens."""
        return self._processor.decode([int(token) for token in tokens])


class StreamDecoder:
    """Turns tokens into text one at a time.

    What `push` has returned, joined, and `flush` at the end, is the text of all tokens as long as
    they are valid UTF-8; a character that is not complete yet is held back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._printed = 0  # characters of decode(_tokens) that were returned

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain, perhaps none."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        complete = len(text)
        while complete and len(text) - complete < _HELD_BACK and text[complete - 1] == _BROKEN:
            complete -= 1
        if len(self._tokens) >= _LONGEST:
            complete = len(text)  # so long a broken run will not become a character
        new = text[self._printed : complete]
        self._printed = max(self._printed, complete)
        if complete == len(text) and len(self._tokens) > 2 * _CONTEXT:
            self._tokens = self._tokens[-_CONTEXT:]
            self._printed = len(self._tokenizer.decode(self._tokens))
        return new

    def flush(self) -> str:
        """Return what was held back, broken characters as U+FFFD, and start anew."""
        rest = self._tokenizer.decode(self._tokens)[self._printed :]
        self._tokens, self._printed = [], 0
        return rest


def load_tokenizer(name: str) -> Tokenizer:
    """Load a tokenizer.

    Args:
        name: "byte"; a tokenizer.json; a folder with tokenizer.json, with encoder.json and
            vocab.bpe (GPT-2) or with vocab.json and merges.txt; a SentencePiece .model; or
            "hub:NAME", a model of the Hugging Face hub.

    Raises:
        UserError: if there is no such file, it is no tokenizer, or its end token is not known.
    """
    if name == "byte":
        return ByteTokenizer()
    if name.startswith(HUB_PREFIX):
        return _load_hub(name)
    path = Path(name).expanduser()
    if path.is_dir():
        if (path / "tokenizer.json").is_file():
            return _load_json(path / "tokenizer.json")
        for vocab, merges in BPE_FILES:
            if (path / vocab).is_file() and (path / merges).is_file():
                return _load_bpe(path / vocab, path / merges)
    elif path.is_file() and path.suffix in (".json", ".model"):
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
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{path} is no tokenizer of the tokenizers library: {error}") from error
    names: tuple[str, ...] = END_TOKENS
    beside = path.with_name("tokenizer_config.json")
    if beside.is_file():
        named = _named_end_token(beside)
        names = (named,) if named else names
    found = [token for name in names if (token := backend.token_to_id(name)) is not None]
    if not found:
        raise UserError(
            f"{path} has no token {' or '.join(names)} to end a document; "
            'name one in tokenizer_config.json beside it: {"eos_token": "..."}'
        )
    return HFTokenizer(backend, found[0], f"json {_checksum(path)} {found[0]}")


def _named_end_token(path: Path) -> str | None:
    try:
        token = json.loads(path.read_text("utf-8")).get("eos_token")
    except (ValueError, AttributeError) as error:
        raise UserError(f"{path} is no JSON object: {error}") from error
    return token.get("content") if isinstance(token, dict) else token


def _load_bpe(vocab: Path, merges: Path) -> HFTokenizer:
    tokenizers = import_library("tokenizers", "train")
    try:
        model = tokenizers.models.BPE.from_file(str(vocab), str(merges))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{vocab} and {merges} are no byte-level BPE: {error}") from error
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    name = next((name for name in END_TOKENS if backend.token_to_id(name) is not None), None)
    if name is None:
        raise UserError(f"{vocab} has no token {' or '.join(END_TOKENS)} to end a document")
    backend.add_special_tokens([name])
    return HFTokenizer(backend, backend.token_to_id(name), f"bpe {_checksum(vocab, merges)}")


def _load_sentencepiece(path: Path) -> SentencePieceTokenizer:
    sentencepiece = import_library("sentencepiece", "train")
    try:
        processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
    except Exception as error:  # RuntimeError or OSError, by version
        raise UserError(f"{path} is no SentencePiece model: {error}") from error
    if processor.eos_id() < 0:
        raise UserError(f"{path} has no </s> to end a document")
    return SentencePieceTokenizer(processor, f"sentencepiece {_checksum(path)}")


def _load_hub(source: str) -> HFTokenizer:
    backend, end = load_hub_tokenizer(source)
    checksum = hashlib.sha256(backend.to_str().encode("utf-8")).hexdigest()
    return HFTokenizer(backend, end, f"json {checksum} {end}")
