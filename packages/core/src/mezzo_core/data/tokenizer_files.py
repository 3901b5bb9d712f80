"""Tokenizers by name: of bytes, of a file or a folder, of the Hugging Face hub."""

import hashlib
from pathlib import Path
from reprlib import repr as shorten
from typing import Any

from mezzo_core.data.find import existing_path
from mezzo_core.data.hub import HUB_PREFIX, load_hub_tokenizer
from mezzo_core.data.tokenizers import ByteTokenizer, HFTokenizer, SentencePieceTokenizer, Tokenizer
from mezzo_core.errors import UserError
from mezzo_core.files import read_json
from mezzo_core.libraries import import_library, library_errors, panics_unprinted

# Usual names of the token that ends a document, tried where no file beside the tokenizer names it.
END_TOKENS = ("<|endoftext|>", "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>")
# Names of the vocabulary and merges files: GPT-2's, and those of later tokenizers.
BPE_FILES = (("encoder.json", "vocab.bpe"), ("vocab.json", "merges.txt"))


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
    named, pad = (_named_token(path, kind) for kind in ("eos_token", "pad_token"))
    names = END_TOKENS if named is None else (named,)
    found = [token for name in names if (token := backend.token_to_id(name)) is not None]
    if not found:
        raise UserError(
            f"{path} has no token {' or '.join(names)} to end a document; "
            'name one in tokenizer_config.json beside it: {"eos_token": "..."}'
        )
    stops = _named_stops(path.with_name("generation_config.json"))
    padding = None if pad is None else backend.token_to_id(pad)
    return HFTokenizer(backend, found[0], f"json {checksum} {found[0]}", str(path), stops, padding)


def _named_token(path: Path, kind: str) -> str | None:
    """Return the `kind`, such as "eos_token", that a file beside a tokenizer.json names, if any."""
    for file in map(path.with_name, ("tokenizer_config.json", "special_tokens_map.json")):
        token = _read_beside(file).get(kind)
        name = token.get("content") if isinstance(token, dict) else token
        if token is not None:
            if not isinstance(name, str) or not name:
                raise UserError(
                    f'{file}: "{kind}" must be text, or {{"content": text}}, got {shorten(token)}'
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
