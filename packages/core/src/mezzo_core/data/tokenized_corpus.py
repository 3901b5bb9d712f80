"""A whole corpus as one array of tokens, each document followed by the end token.

With a cache folder the array is a file, written once and read by every process.
`token_store` is the folder that all runs of a user share.
"""

import glob
import hashlib
import json
import logging
import os
import secrets
import shutil
import socket
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mezzo_core.data.corpora import Corpus, Piece
from mezzo_core.data.stored_tokens import StoredTokens
from mezzo_core.data.tokenizers import Tokenizer
from mezzo_core.errors import UserError
from mezzo_core.files import acquire, is_foreign, read_json, remove
from mezzo_core.libraries import first_line, import_library

# Part of the cache key: raise it when the same text would give other tokens or files.
_FORMAT = 2
# Text is tokenized in batches of about this many characters, or this many pieces. With such large
# ones, the other cores have work while one is busy with a long document.
_BATCH_CHARACTERS = 1 << 23
_BATCH_PIECES = 1 << 14
# The marker file holds the checksums of the other two and is written last. Its name and that of the
# folder ("packed-...") must not change: users have such folders on their disks.
_TOKENS, _DOCUMENTS, _MARKER = "tokens.npy", "documents.npy", "packed.json"
# The checksum of stored tokens is computed over this many tokens at a time.
_CHECKED_TOKENS = 1 << 23

logger = logging.getLogger(__name__)


class Checksums(NamedTuple):
    """CRC-32 of the values in hexadecimal, equal for a corpus in memory and on disk."""

    tokens: str
    documents: str


@dataclass(frozen=True)
class TokenizedCorpus:
    """Tokens of a corpus: document i is tokens[ends[i - 1] : ends[i]], with its end token."""

    tokens: NDArray[Any] | StoredTokens  # (num_tokens,) uint16 or uint32
    ends: NDArray[np.int64]  # (num_documents,), increasing
    num_bytes: NDArray[np.int64]  # (num_documents,), length of the text in UTF-8
    checksums: Checksums


def token_store() -> Path:
    """Return the folder of tokens that all runs share: the same text is tokenized once.

    It is what the environment variable MEZZO_TOKENS says, else mezzo/tokens in the user's folder of
    caches. Its content can be removed whenever no run uses it.

    Raises:
        UserError: if the user has no home, as in some containers, and neither folder is told.
    """
    told = os.environ.get("MEZZO_TOKENS")
    try:
        if told:
            return Path(told).expanduser()
        caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    except RuntimeError:
        raise UserError(
            f"cannot keep tokens: {told or 'this user'} has no home folder; the environment "
            "variable MEZZO_TOKENS can name a folder"
        ) from None
    return caches / "mezzo" / "tokens"


def tokenize_corpus(
    corpus: Corpus, tokenizer: Tokenizer, cache_dir: Path | None, *, check: bool = True
) -> TokenizedCorpus:
    """Tokenize a corpus, or find it in the cache.

    Documents without text are left out. With `cache_dir`, the tokens are stored in a folder named
    by a hash of the corpus's and the tokenizer's identity. That folder is written under another
    name and renamed when it is complete, so a killed process leaves no half-written tokens to be
    read. A second process waits for the first and uses its tokens. A damaged folder is removed and
    written again, with a warning in the log.

    Args:
        corpus: the text.
        tokenizer: makes the tokens.
        cache_dir: folder for the tokens; None keeps them in memory.
        check: compare all stored tokens with their checksum, which takes about a second a gigabyte.
            Pass False if another process has just checked them.

    Raises:
        UserError: if there is no text, or the cache cannot be written.
    """
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 1 << 16 else np.uint32)
    if cache_dir is None:
        parts: list[NDArray[Any]] = []
        documents, checksums = _tokenize(corpus, tokenizer, dtype, parts.append)
        return TokenizedCorpus(np.concatenate(parts), documents[0], documents[1], checksums)
    key = f"{_FORMAT}\0{corpus.identity}\0{tokenizer.identity}"
    folder = cache_dir / f"packed-{hashlib.sha256(key.encode('utf-8')).hexdigest()[:24]}"
    lock = folder.with_suffix(".lock")
    filelock = import_library("filelock", "train")
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        for path in (cache_dir, lock):
            if path.is_symlink():
                raise UserError(f"cannot keep tokens in {cache_dir}: {path} is a link")
        with acquire(filelock.FileLock(lock)):
            if os.path.lexists(folder):
                if is_foreign(folder.lstat()):
                    raise UserError(
                        f"{folder} belongs to another user, whose tokens are not trusted: "
                        "the environment variable MEZZO_TOKENS can name another folder"
                    )
                try:
                    return _load(folder, tokenizer, dtype, check)
                except ValueError as error:
                    logger.warning("%s is damaged (%s): tokenizing the corpus again", folder, error)
                    remove(folder)
            _write(corpus, tokenizer, dtype, folder)
            return _load(folder, tokenizer, dtype, check=False)
    except OSError as error:
        advice = "the environment variable MEZZO_TOKENS can name another folder"
        raise UserError(f"cannot keep tokens in {cache_dir}: {error}; {advice}") from error


def _load(folder: Path, tokenizer: Tokenizer, dtype: np.dtype[Any], check: bool) -> TokenizedCorpus:
    """Open what `_write` wrote.

    Raises:
        ValueError: if the folder is damaged; the message says how.
    """
    for name in (_TOKENS, _DOCUMENTS, _MARKER):
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
    marker = read_json(folder / _MARKER)
    with _array_errors(folder / _TOKENS):
        tokens = StoredTokens(folder / _TOKENS)
    with _array_errors(folder / _DOCUMENTS), (folder / _DOCUMENTS).open("rb") as file:
        if is_foreign(os.fstat(file.fileno())):
            raise ValueError("it belongs to another user")
        documents = np.lib.format.read_array(file, allow_pickle=False)
    if tokens.dtype != dtype:
        raise ValueError(f"{_TOKENS} holds no tokens of this vocabulary")
    if documents.dtype != np.int64 or documents.ndim != 2 or len(documents) != 2:
        raise ValueError(f"{_DOCUMENTS} holds no documents")
    ends, num_bytes = documents
    rising = len(ends) > 0 and ends[0] > 0 and bool((ends[1:] > ends[:-1]).all())
    if not rising or ends[-1] != len(tokens) or num_bytes.min() < 0:
        raise ValueError(f"{_DOCUMENTS} does not fit {_TOKENS}")
    found = Checksums(
        _checksum_of(tokens, tokenizer.vocab_size) if check else str(marker.get("tokens")),
        _hexadecimal(zlib.crc32(np.ascontiguousarray(documents).data)),
    )
    if marker != found._asdict():
        raise ValueError("its checksums differ")
    return TokenizedCorpus(tokens, ends, num_bytes, found)


@contextmanager
def _array_errors(path: Path) -> Iterator[None]:
    """Turn any error but an OSError into a ValueError: damaged headers and pickles raise any."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        raise ValueError(f"{path.name} cannot be read ({first_line(error)})") from error


def _checksum_of(tokens: StoredTokens, vocab_size: int) -> str:
    checksum = 0
    for first in range(0, len(tokens), _CHECKED_TOKENS):
        part = tokens.read(first, min(_CHECKED_TOKENS, len(tokens) - first))
        if int(part.max()) >= vocab_size:
            raise ValueError(f"{_TOKENS} has tokens beyond the vocabulary")
        checksum = zlib.crc32(part.data, checksum)
    return _hexadecimal(checksum)


def _hexadecimal(checksum: int) -> str:
    return f"{checksum:08x}"


def _write(corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype[Any], folder: Path) -> None:
    # The host is part of the name: on a file system whose locks do not reach other machines, each
    # machine then writes its own folder. The rest of the name is random, so that nobody can place
    # a link there beforehand and redirect the tokens.
    prefix = f"{folder.name}.{socket.gethostname()}"
    for left in folder.parent.glob(f"{glob.escape(prefix)}.*.partial"):
        shutil.rmtree(left, ignore_errors=True)  # left by a killed process
    partial = folder.with_name(f"{prefix}.{secrets.token_hex(8)}.partial")
    partial.mkdir()
    try:
        with (partial / _TOKENS).open("xb") as file:
            _write_header(file, dtype, (0,))
            documents, checksums = _tokenize(
                corpus, tokenizer, dtype, lambda part: file.write(part.data)
            )
            file.seek(0)
            _write_header(file, dtype, (int(documents[0, -1]),))
            _to_disk(file)
        with (partial / _DOCUMENTS).open("xb") as file:
            _write_header(file, documents.dtype, documents.shape)
            file.write(documents.data)
            _to_disk(file)
        with (partial / _MARKER).open("xb") as file:
            file.write(json.dumps(checksums._asdict()).encode())
            _to_disk(file)
        try:
            partial.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _write_header(file: BinaryIO, dtype: np.dtype[Any], shape: tuple[int, ...]) -> None:
    """Write a .npy header, whose size does not depend on the array's length.

    So the header can be written first with length 0, and replaced at the end. The values are
    written through the file and not by numpy, which does not report a full disk.
    """
    np.lib.format.write_array_header_1_0(
        file,
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape},
    )


def _to_disk(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    dtype: np.dtype[Any],
    write: Callable[[NDArray[Any]], Any],
) -> tuple[NDArray[np.int64], Checksums]:
    """Write all tokens; return (2, num_documents), each document's end and its bytes of text."""
    ends: list[int] = []
    sizes: list[int] = []
    end_token = np.array([tokenizer.eos_token], dtype)
    checksum = 0
    total = length = size = 0  # tokens so far; tokens and bytes of the current document
    for batch in _batches(corpus.read()):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        for piece, tokens in zip(batch, encoded, strict=True):
            begin = () if length else tokenizer.begin_tokens
            part = np.array([*begin, *tokens] if begin and len(tokens) else tokens, dtype)
            write(part)
            checksum = zlib.crc32(part.data, checksum)
            length += len(part)
            size += len(piece.text.encode("utf-8"))
            if piece.ends and length:
                write(end_token)
                checksum = zlib.crc32(end_token.data, checksum)
                total += length + 1
                ends.append(total)
                sizes.append(size)
            if piece.ends:  # also without tokens: its bytes are not the next document's
                length = size = 0
    if not ends:
        raise UserError(f"no text in {corpus.name}")
    documents = np.array([ends, sizes], dtype=np.int64)
    return documents, Checksums(*map(_hexadecimal, (checksum, zlib.crc32(documents.data))))


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
