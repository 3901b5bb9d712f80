"""Corpora: the embedded novels, files, folders, globs and hub data sets, read as documents."""

import gzip
import hashlib
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from mezzo_core.data.embedded import embedded_bytes, embedded_documents
from mezzo_core.data.find import find_files, format_of, split_suffix
from mezzo_core.data.hub import HUB_PREFIX, load_hub_dataset
from mezzo_core.data.xz import open_xz
from mezzo_core.errors import UserError
from mezzo_core.files import parse_json
from mezzo_core.libraries import import_library, library_errors

# A longer text file is tokenized in pieces of about this many characters, each ending with a line.
PIECE_CHARACTERS = 1 << 22
# To recognize a file, this many bytes at its beginning and its end are compared.
_SAMPLE_BYTES = 1 << 16


class Piece(NamedTuple):
    """A document, or a part of a document that is too long to be held in memory as a whole."""

    text: str
    ends: bool  # whether the document ends here


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read repeatedly, always in the same order."""

    name: str  # for messages
    identity: str  # differs when the text may differ
    read: Callable[[], Iterator[Piece]]


def open_corpus(source: str, text_column: str) -> Corpus:
    """Find a corpus without reading its text yet.

    Args:
        source: "embedded"; or a file, a folder or a glob of .txt files (one document a file),
            .jsonl files (one document a line) or .parquet files (one document a row), the first
            two also with .xz or .gz; or "hub:NAME" or "hub:NAME:CONFIG", the split "train" of a
            data set of the Hugging Face hub.
        text_column: the field that holds the text, in .jsonl, .parquet and hub data sets.

    Raises:
        UserError: if there is no such file, nothing readable in the folder, or no such data set.
    """
    if source == "embedded":
        checksum = hashlib.sha256(embedded_bytes()).hexdigest()
        return Corpus(
            "the embedded corpus",
            f"embedded {checksum}",
            lambda: (Piece(text, True) for text in embedded_documents()),
        )
    if source.startswith(HUB_PREFIX):
        dataset = load_hub_dataset(source, split="train", streaming=False)
        return Corpus(
            source,
            f"{source} {dataset._fingerprint} {text_column}",
            lambda: (Piece(text, True) for text in texts_of(dataset, text_column, source)),
        )
    paths = find_files(source)

    def read() -> Iterator[Piece]:
        for path in paths:
            yield from read_file(path, text_column)

    listing = []
    for path in paths:
        with _clear_errors(path):
            stat = path.stat()
        # The modification time can be set back after a write; the change time (ctime) cannot.
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        listing.append((str(path.resolve()), *sample_file(path), *times))
    return Corpus(source, json.dumps(["files", text_column, listing]), read)


def sample_file(path: Path) -> tuple[int, int]:
    """Return a file's size and a checksum of its beginning and its end.

    A change in the middle of a long file that keeps its size goes unnoticed.

    Raises:
        UserError: if the file cannot be read.
    """
    with _clear_errors(path), path.open("rb") as file:
        size = file.seek(0, io.SEEK_END)
        file.seek(0)
        begin = file.read(_SAMPLE_BYTES)
        file.seek(max(len(begin), size - _SAMPLE_BYTES))
        return size, zlib.crc32(file.read(_SAMPLE_BYTES), zlib.crc32(begin))


def read_file(path: Path, text_column: str) -> Iterator[Piece]:
    """Yield the documents of one file.

    Raises:
        UserError: if the file cannot be read or a record lacks the text. The message names the
            file and the line.
    """
    form = format_of(path)
    if form == ".parquet":
        yield from _read_parquet(path, text_column)
        return
    with _clear_errors(path), _open_text(path) as file:
        yield from _read_txt(file) if form == ".txt" else _read_jsonl(file, path, text_column)


def _open_text(path: Path) -> Any:
    openers: dict[str, Any] = {".xz": open_xz, ".gz": gzip.open, "": partial(io.open, mode="rb")}
    return io.TextIOWrapper(openers[split_suffix(path)[1]](path), encoding="utf-8-sig")


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {path}: {reason}") from error
    except MemoryError as error:  # a huge line, or a damaged header that asks for huge memory
        raise UserError(f"cannot read {path}: the memory is too small") from error


def _read_txt(file: Any) -> Iterator[Piece]:
    text = file.read(PIECE_CHARACTERS)
    while following := file.read(PIECE_CHARACTERS):
        text += following
        cut = text.rfind("\n") + 1 or len(text)
        yield Piece(text[:cut], False)
        text = text[cut:]
    yield Piece(text, True)


def _read_jsonl(file: Any, path: Path, text_column: str) -> Iterator[Piece]:
    for number, line in enumerate(file, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = parse_json(line)
        except ValueError as error:
            raise UserError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: a JSON object is needed, got {type(record).__name__}")
        yield Piece(text_of(record, text_column, where), True)


def _read_parquet(path: Path, text_column: str) -> Iterator[Piece]:
    parquet = import_library("pyarrow.parquet", "train")
    row = 0
    with (
        library_errors(f"cannot read {path}"),
        parquet.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        names = file.schema_arrow.names
        if text_column not in names:
            raise UserError(_missing_column(text_column, names, str(path)))
        for batch in file.iter_batches(batch_size=256, columns=[text_column]):
            for text in batch.column(0).to_pylist():
                row += 1
                where = f"{path}, row {row}"
                yield Piece(text_of({text_column: text}, text_column, where), True)


def _missing_column(text_column: str, names: Iterable[str], where: str) -> str:
    shown = [repr(name) for name in itertools.islice(names, 10)]
    return (
        f"{where}: no field {text_column!r}; there is {', '.join(shown) or 'none'}; "
        "text_column (--text-column) names the field of the text"
    )


def texts_of(rows: Iterable[Any], text_column: str, name: str) -> Iterator[str]:
    """Yield the texts of a data set of the library `datasets`.

    Raises:
        UserError: if a row cannot be read, or has no text.
    """
    rows = iter(rows)
    while True:
        with library_errors(f"cannot read {name}"):
            try:
                row = next(rows)
            except StopIteration:
                return
        yield text_of(row, text_column, name)


def text_of(record: dict[str, Any], text_column: str, where: str) -> str:
    """Return the text of one record. In messages, `where` names the record.

    Raises:
        UserError: if the record lacks the field, or the field's value is not text.
    """
    if text_column not in record:
        raise UserError(_missing_column(text_column, record, where))
    text = record[text_column]
    if not isinstance(text, str):
        raise UserError(f"{where}: {text_column!r} must be text, got {type(text).__name__}")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise UserError(f"{where}: {text_column!r} is not Unicode: {error.reason}") from error
    return text
