"""A whole corpus as one array of tokens, each document followed by the end token.

With a cache folder the array is a memory-mapped file, written once and read by every process.
"""

import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mezzo_core.data.corpora import Corpus, Piece
from mezzo_core.data.libraries import import_library
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError

# Part of the cache key: raise it when the same text would be packed differently.
_FORMAT = 1
# Text is tokenized in batches of about this many characters, or this many pieces.
_BATCH_CHARACTERS = 1 << 21
_BATCH_PIECES = 4096
_TOKENS, _DOCUMENTS = "tokens.npy", "documents.npy"


@dataclass(frozen=True)
class PackedCorpus:
    """Tokens of a corpus; document i is tokens[ends[i - 1] : ends[i]], its end token the last."""

    tokens: NDArray[Any]  # (num_tokens,) uint16 or uint32
    ends: NDArray[np.int64]  # (num_documents,), increasing
    num_bytes: NDArray[np.int64]  # (num_documents,), of the text in UTF-8


def pack_corpus(corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path | None) -> PackedCorpus:
    """Tokenize a corpus, or find it in the cache.

    Documents without text are left out. With `cache_dir`, the result is in a folder named by a
    hash of the corpus's and the tokenizer's identity. It is written beside its place and moved
    there when complete, so that a process killed half-way leaves nothing that would be read; a
    second process waits for the first, and uses what that one wrote.

    Args:
        corpus: what to read.
        tokenizer: makes the tokens.
        cache_dir: where to keep them; None keeps them in memory.

    Raises:
        UserError: if there is no text, or the cache cannot be written.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    if cache_dir is None:
        parts: list[NDArray[Any]] = []
        documents = _pack(corpus, tokenizer, lambda part: parts.append(part.astype(dtype)))
        return PackedCorpus(np.concatenate(parts), documents[0], documents[1])
    key = f"{_FORMAT}\0{corpus.identity}\0{tokenizer.identity}"
    folder = cache_dir / f"packed-{hashlib.sha256(key.encode('utf-8')).hexdigest()[:24]}"
    filelock = import_library("filelock", "train")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        if not folder.is_dir():
            with filelock.FileLock(folder.with_suffix(".lock")):
                if not folder.is_dir():
                    _write(corpus, tokenizer, dtype, folder)
        return _load(folder)
    except OSError as error:
        raise UserError(f"cannot keep packed tokens in {cache_dir}: {error}") from error


def _load(folder: Path) -> PackedCorpus:
    documents = np.load(folder / _DOCUMENTS, allow_pickle=False)
    tokens = np.load(folder / _TOKENS, mmap_mode="r", allow_pickle=False)
    return PackedCorpus(tokens, documents[0], documents[1])


def _write(corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype[Any], folder: Path) -> None:
    # Named by the host: where a lock does not reach other machines, each writes its own.
    partial = folder.with_suffix(f".{socket.gethostname()}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # a killed process's
    partial.mkdir()
    try:
        with (partial / _TOKENS).open("wb") as file:
            _write_header(file, dtype, 0)
            documents = _pack(corpus, tokenizer, lambda part: part.astype(dtype).tofile(file))
            file.seek(0)
            _write_header(file, dtype, int(documents[0, -1]))
            _to_disk(file)
        with (partial / _DOCUMENTS).open("wb") as file:
            np.save(file, documents)
            _to_disk(file)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_header(file: BinaryIO, dtype: np.dtype[Any], length: int) -> None:
    """Write a .npy header; numpy leaves room in it, so that it is as long for any length."""
    np.lib.format.write_array_header_1_0(
        file,
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (length,)},
    )


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _pack(
    corpus: Corpus, tokenizer: Tokenizer, write: Callable[[NDArray[Any]], Any]
) -> NDArray[np.int64]:
    """Write all tokens; return (2, num_documents): where each ends, and its bytes of text."""
    ends: list[int] = []
    sizes: list[int] = []
    end_token = np.array([tokenizer.eos_token])
    total = length = size = 0  # of everything; of the current document
    for batch in _batches(corpus.read()):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            write(tokens)
            length += len(tokens)
            size += len(piece.text.encode("utf-8"))
            if piece.ends and length:
                write(end_token)
                total += length + 1
                ends.append(total)
                sizes.append(size)
                length = size = 0
    if not ends:
        raise UserError(f"no text in {corpus.name}")
    return np.array([ends, sizes], dtype=np.int64)


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
