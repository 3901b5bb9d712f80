"""Where text comes from: the embedded novels, files, folders, globs and hub data sets."""

import glob
import gzip
import hashlib
import io
import json
import lzma
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mezzo_core.data.embedded import embedded_bytes, embedded_documents
from mezzo_core.data.hub import HUB_PREFIX, load_hub_dataset
from mezzo_core.data.libraries import import_library
from mezzo_core.errors import UserError

FORMATS = (".txt", ".jsonl", ".parquet")
COMPRESSIONS = (".xz", ".gz")
# A longer text file is tokenized in pieces of about this many characters, cut after a line.
PIECE_CHARACTERS = 1 << 22


class Piece(NamedTuple):
    """A document, or a part of one that is too long to be held whole."""

    text: str
    ends: bool  # whether the document ends here


@dataclass(frozen=True)
class Corpus:
    """Documents that can be read again and again, in one order."""

    name: str  # for messages
    identity: str  # differs when the text may differ
    read: Callable[[], Iterator[Piece]]


def open_corpus(source: str, text_column: str) -> Corpus:
    """Find a corpus; no text is read yet.

    Args:
        source: "embedded", a file, a folder or a glob of .txt (one document a file), .jsonl (one
            a line) or .parquet (one a row), the first two also with .xz or .gz; or "hub:NAME" or
            "hub:NAME:CONFIG", a data set of the Hugging Face hub, of which the split "train" is
            taken.
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
            lambda: (Piece(text_of(row, text_column, source), True) for row in dataset),
        )
    paths = find_files(source)

    def read() -> Iterator[Piece]:
        for path in paths:
            yield from read_file(path, text_column)

    stats = [(str(path.resolve()), path.stat()) for path in paths]
    listing = [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats]
    return Corpus(source, json.dumps(["files", text_column, listing]), read)


def find_files(source: str) -> list[Path]:
    """Return the corpus files that a path names, sorted: one file, a folder's, or a glob's.

    In folders and globs, empty files and names that start with a dot are passed over.

    Raises:
        UserError: if there is none, or a file has a format that is not read.
    """
    path = Path(source).expanduser()
    if path.is_file():
        _format_of(path)
        if path.stat().st_size == 0:
            raise UserError(f"{source} is empty")
        return [path]
    if source and path.is_dir():
        found = sorted(path.rglob("*"))
    elif glob.has_magic(source):
        names = glob.glob(str(path), recursive=True)  # noqa: PTH207 - Path.glob needs a root
        found = sorted(Path(name) for name in names)
    else:
        raise UserError(
            f'no file or folder {source!r}; a source is "embedded", a file, a folder or a glob of '
            f'{", ".join(FORMATS)}, or "hub:NAME"'
        )
    paths = [
        file
        for file in found
        if _split_suffix(file)[0] in FORMATS
        and not file.name.startswith(".")
        and file.is_file()
        and file.stat().st_size > 0
    ]
    if not paths:
        raise UserError(f"no {', '.join(FORMATS)} file with text in {source!r}")
    return paths


def read_file(path: Path, text_column: str) -> Iterator[Piece]:
    """Yield the documents of one file.

    Raises:
        UserError: if the file cannot be read, or a record lacks the text; names file and line.
    """
    form = _format_of(path)
    if form == ".parquet":
        yield from _read_parquet(path, text_column)
        return
    with _clear_errors(path), _open_text(path) as file:
        yield from _read_txt(file) if form == ".txt" else _read_jsonl(file, path, text_column)


def _split_suffix(path: Path) -> tuple[str, str]:
    """Return the format and the compression that a name ends with, each perhaps ""."""
    suffixes = [suffix.lower() for suffix in path.suffixes[-2:]] or [""]
    if suffixes[-1] in COMPRESSIONS:
        return (suffixes[-2] if len(suffixes) > 1 else ""), suffixes[-1]
    return suffixes[-1], ""


def _format_of(path: Path) -> str:
    form, compression = _split_suffix(path)
    if form not in FORMATS or (form == ".parquet" and compression):
        raise UserError(
            f"cannot read {path}: a corpus file ends in {', '.join(FORMATS)}; "
            f"text and lines also with {' or '.join(COMPRESSIONS)}"
        )
    return form


def _open_text(path: Path) -> Any:
    openers: dict[str, Any] = {".xz": lzma.open, ".gz": gzip.open, "": io.open}
    return openers[_split_suffix(path)[1]](path, "rt", encoding="utf-8-sig")


@contextmanager
def _clear_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: {error.reason}") from error
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise UserError(f"cannot read {path}: {error}") from error


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
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{where}: not JSON ({error.msg})") from error
        if not isinstance(record, dict):
            raise UserError(f"{where}: a JSON object is needed, got {type(record).__name__}")
        yield Piece(text_of(record, text_column, where), True)


def _read_parquet(path: Path, text_column: str) -> Iterator[Piece]:
    parquet = import_library("pyarrow.parquet", "train")
    arrow = import_library("pyarrow", "train")
    row = 0
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if text_column not in names:
                raise UserError(_missing_column(text_column, names, str(path)))
            for batch in file.iter_batches(batch_size=256, columns=[text_column]):
                for text in batch.column(0).to_pylist():
                    row += 1
                    where = f"{path}, row {row}"
                    yield Piece(text_of({text_column: text}, text_column, where), True)
    except (OSError, arrow.ArrowException) as error:
        raise UserError(f"cannot read {path}: {error}") from error


def _missing_column(text_column: str, names: Any, where: str) -> str:
    return f"{where}: no field {text_column!r}; there is {', '.join(map(repr, names)) or 'none'}"


def text_of(record: dict[str, Any], text_column: str, where: str) -> str:
    """Return the text of one record; `where` says in messages which.

    Raises:
        UserError: if the record has no such field, or no text in it.
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
