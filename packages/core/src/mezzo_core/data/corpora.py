"""Corpora: the embedded novels, files, folders, globs and hub data sets, read as documents."""

import csv
import gzip
import hashlib
import io
import json
import logging
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

logger = logging.getLogger(__name__)


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


@dataclass
class Records:
    """Reads the texts of records. One without text is refused, or left out and counted."""

    text_column: str  # the field that holds the text
    skip_bad: bool = False
    read: int = 0
    left_out: int = 0

    def pieces(self, get: Callable[[str], str]) -> Iterator[Piece]:
        """Yield a record's text as a document; `get` returns the text of one of its fields.

        Raises:
            UserError: what `get` raises, unless bad records are left out.
        """
        self.read += 1
        try:
            text = get(self.text_column)
        except UserError as error:
            if not self.skip_bad:
                advice = "skip_bad (--skip-bad) leaves such records out"
                raise UserError(f"{error}; {advice}") from error
            if not self.left_out:
                logger.warning("left out: %s", error)
            self.left_out += 1
        else:
            yield Piece(text, True)

    def report(self, name: str) -> None:
        """Say in the log how many records of `name` were left out, if any."""
        if self.left_out:
            logger.warning("%s: left out %d of %d records", name, self.left_out, self.read)


def open_corpus(source: str, text_column: str, *, skip_bad: bool = False) -> Corpus:
    """Find a corpus without reading its text yet.

    Args:
        source: "embedded"; or a file, a folder or a glob of .txt files (one document a file),
            .jsonl files (one document a line), .json files (an array of documents, one document, or
            lines), .csv files with a header, or .parquet files (one document a row), all but the
            last also with .xz, .gz or .zst; or "hub:OWNER/NAME" or "hub:OWNER/NAME:CONFIG", the
            split "train" of a data set of the Hugging Face hub.
        text_column: the field that holds the text, in all but .txt files.
        skip_bad: leave out records without text, and say in the log how many.

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
    how = " skip_bad" if skip_bad else ""
    if source.startswith(HUB_PREFIX):
        dataset = load_hub_dataset(source, split="train", streaming=False)
        return Corpus(
            source,
            f"{source} {dataset._fingerprint} {text_column}{how}",
            lambda: pieces_of(dataset, Records(text_column, skip_bad), source),
        )
    paths = find_files(source)

    def read() -> Iterator[Piece]:
        records = Records(text_column, skip_bad)
        for path in paths:
            yield from read_file(path, records)
        records.report(source)

    listing = []
    for path in paths:
        with _clear_errors(path):
            stat = path.stat()
        # The modification time can be set back after a write; the change time (ctime) cannot.
        times = (stat.st_mtime_ns, stat.st_ctime_ns)
        listing.append((str(path.resolve()), *sample_file(path), *times))
    return Corpus(source, json.dumps([f"files as they are{how}", text_column, listing]), read)


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


def read_file(path: Path, records: Records) -> Iterator[Piece]:
    """Yield the documents of one file.

    Raises:
        UserError: if the file cannot be read or a record lacks the text. The message names the
            file and the line.
    """
    form = format_of(path)
    if form == ".parquet":
        yield from _read_parquet(path, records)
        return
    with _clear_errors(path), _open_text(path) as file:
        yield from _read_txt(file) if form == ".txt" else _READERS[form](file, path, records)


def _open_text(path: Path) -> Any:
    openers: dict[str, Any] = {
        ".xz": open_xz,
        ".gz": gzip.open,
        ".zst": _open_zst,
        "": partial(io.open, mode="rb"),
    }
    # Line ends stay as they are in the file.
    return io.TextIOWrapper(openers[split_suffix(path)[1]](path), encoding="utf-8-sig", newline="")


def _open_zst(path: Path) -> Any:
    return import_library("pyarrow", "train").input_stream(str(path), compression="zstd")


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        before = error.object[: error.start].decode(errors="replace")[-20:]
        after = f" after {before!r}" if before else ""
        what = f"{error.reason} 0x{error.object[error.start]:02x}{after}"
        raise UserError(f"{path} is not UTF-8 text: {what}") from error
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


def read_lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the lines of a file that are not blank, each after words for its place.

    Raises:
        UserError: if the file cannot be read.
    """
    with _clear_errors(path), _open_text(path) as file:
        yield from _lines(file, path)


def _lines(file: Any, path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            yield f"{path}, line {number}", line


def _read_jsonl(file: Any, path: Path, records: Records) -> Iterator[Piece]:
    for where, line in _lines(file, path):
        yield from records.pieces(partial(_text_of_line, line, where))


def _text_of_line(line: str, where: str, text_column: str) -> str:
    return text_of(parse_record(line, where), where, text_column)


def _read_json(file: Any, path: Path, records: Records) -> Iterator[Piece]:
    content = file.read()
    if content.lstrip().startswith("["):
        every = parse_record(content, str(path))
    else:
        try:
            every = [parse_json(content)]
        except ValueError:  # several records, one a line
            yield from _read_jsonl(io.StringIO(content), path, records)
            return
    for number, record in enumerate(every, start=1):
        yield from records.pieces(partial(text_of, record, f"{path}, record {number}"))


def parse_record(text: str, where: str) -> Any:
    """Return the value of a JSON text; in the error's message, `where` names the record.

    Raises:
        UserError: if it is not JSON.
    """
    try:
        return parse_json(text)
    except ValueError as error:
        raise UserError(f"{where}: not JSON ({getattr(error, 'msg', error)})") from error


def _read_csv(file: Any, path: Path, records: Records) -> Iterator[Piece]:
    csv.field_size_limit(2**31 - 1)  # of this process; 128 KB by default
    rows = csv.DictReader(file, strict=True)
    try:
        if (rows.fieldnames or []).count(records.text_column) > 1:
            raise UserError(f"{path}: the header has {records.text_column!r} twice: rename one")
        for row in rows:
            where = f"{path}, line {rows.line_num}"
            yield from records.pieces(partial(_text_of_row, row, where))
    except csv.Error as error:
        raise UserError(f"{path}, line {rows.reader.line_num}: not CSV ({error})") from error


def _text_of_row(row: dict[Any, Any], where: str, text_column: str) -> str:
    if None in row:  # a comma in a text without quotes would cut it off
        raise UserError(f"{where}: more fields than the header has")
    return text_of(row, where, text_column)


_READERS = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv}


def _read_parquet(path: Path, records: Records) -> Iterator[Piece]:
    parquet = import_library("pyarrow.parquet", "train")
    row, column = 0, records.text_column
    with (
        library_errors(f"cannot read {path}"),
        parquet.ParquetFile(path, page_checksum_verification=True) as file,
    ):
        names = file.schema_arrow.names
        if column not in names:
            raise UserError(_missing_column(column, names, str(path)))
        for batch in file.iter_batches(batch_size=256, columns=[column]):
            for text in batch.column(0).to_pylist():
                row += 1
                yield from records.pieces(partial(text_of, {column: text}, f"{path}, row {row}"))


def _missing_column(text_column: str, names: Iterable[str], where: str) -> str:
    names = list(names)
    shown = ", ".join(map(repr, names[:10]))
    advice = "; --sft reads prompts with answers" if {"prompt", "messages"} & {*names} else ""
    return (
        f"{where}: no field {text_column!r}; there is {shown or 'none'}, which "
        f"text_column (--text-column) can name{advice}"
    )


def pieces_of(rows: Iterable[Any], records: Records, name: str) -> Iterator[Piece]:
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
                records.report(name)
                return
        yield from records.pieces(partial(text_of, row, name))


def text_of(record: Any, where: str, text_column: str) -> str:
    """Return the text of one record. In messages, `where` names the record.

    Raises:
        UserError: if it is no record with this field, or the field's value is not text.
    """
    if not isinstance(record, dict):
        raise UserError(f"{where}: a JSON object is needed, got {type(record).__name__}")
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
