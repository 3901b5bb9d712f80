"""Opens a text as a stream of `datasets`, and shares it among processes."""

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mezzo_core.data.corpora import Corpus, Records, pieces_of, read_file, sample_file
from mezzo_core.data.find import find_files
from mezzo_core.data.hub import HUB_PREFIX, load_hub_dataset
from mezzo_core.errors import UserError
from mezzo_core.libraries import import_library

# How many documents are held out (see `StreamedText`), or fewer if they have so many characters.
VALIDATION_DOCUMENTS, VALIDATION_CHARACTERS = 100, 1 << 23


@dataclass(frozen=True)
class TextStream:
    """This process's share of a stream, and the held-out documents, equal in all processes."""

    name: str
    dataset: Any  # datasets.IterableDataset, of all files or of this process's
    validation: list[str]
    text_column: str
    rank: int = 0
    world_size: int = 1
    skip_bad: bool = False  # leave out records without text
    identity: str = ""  # identifies the text as far as that is possible without reading it
    skipped: int = 0  # documents of the data set before the first of this process
    every: int = 1  # this process takes one document in so many


def open_stream(
    source: str,
    text_column: str,
    *,
    held_out: Corpus | None = None,
    skip_bad: bool = False,
    rank: int = 0,
    world_size: int = 1,
) -> TextStream:
    """Open files or a hub data set as a stream.

    Args:
        source: as in `open_corpus`, but not "embedded".
        text_column: the field that holds the text.
        held_out: another text to hold out; None holds out documents of the stream.
        skip_bad: leave out records without text.
        rank: this process.
        world_size: how many processes share the stream.

    Raises:
        UserError: if the source cannot be found, reached or streamed.
    """
    datasets = import_library("datasets", "train")
    if source == "embedded":
        raise UserError("the embedded corpus is not streamed: set streaming=False (--no-streaming)")
    sharing: dict[str, Any] = {"skip_bad": skip_bad, "rank": rank, "world_size": world_size}
    validation: list[str] | None = None
    if not source.startswith(HUB_PREFIX):
        paths = find_files(source)
        listing = json.dumps([(path.name, *sample_file(path)) for path in paths])
        sharing["identity"] = hashlib.sha256(listing.encode()).hexdigest()
        options = {"files": list(map(str, paths)), "text_column": text_column, "skip_bad": skip_bad}
        train = datasets.IterableDataset.from_generator(_file_rows, gen_kwargs=options)
    else:
        splits = load_hub_dataset(source, split=None, streaming=True)
        if "train" not in splits:
            raise UserError(f'{source!r} has no split "train"; there is {", ".join(splits)}')
        train = splits["train"]
        if "validation" in splits and held_out is None:
            records = Records(text_column, skip_bad)
            found = _first_texts(splits["validation"], records, source, VALIDATION_DOCUMENTS)
            validation = [text for text, _ in found]
    if held_out is not None:
        validation = [piece.text for piece in held_out.read()]
    # Files of a hub data set have about one size, and it takes a process long to load all of them.
    by_file = source.startswith(HUB_PREFIX)
    if validation is None:
        return share_stream(source, train, text_column, by_file=by_file, **sharing)
    mine, skipped, every = _share(train, 0, rank, world_size, by_file=by_file)
    return TextStream(
        source, mine, validation, text_column, skipped=skipped, every=every, **sharing
    )


def share_stream(
    name: str,
    dataset: Any,
    text_column: str,
    *,
    skip_bad: bool = False,
    rank: int = 0,
    world_size: int = 1,
    identity: str = "",
    by_file: bool = False,
) -> TextStream:
    """Hold out a data set's first documents and give this process its share of the others.

    The data set is a `datasets.IterableDataset` whose order is fixed. With `by_file` processes read
    whole files, where these can be shared out evenly. For the other arguments see `TextStream`.
    """
    records = Records(text_column, skip_bad)
    found = _first_texts(dataset, records, name, VALIDATION_DOCUMENTS + 1)
    has_more = len(found) > VALIDATION_DOCUMENTS or _characters(found) >= VALIDATION_CHARACTERS
    found = found[: VALIDATION_DOCUMENTS if has_more else max(len(found) // 10, 1)]
    validation = [text for text, _ in found]
    held_out = found[-1][1] if found else 0
    mine, skipped, every = _share(dataset, held_out, rank, world_size, by_file=by_file)
    return TextStream(
        name, mine, validation, text_column, rank, world_size, skip_bad, identity, skipped, every
    )


def _file_rows(files: list[str], text_column: str, skip_bad: bool) -> Iterator[dict[str, str]]:
    records = Records(text_column, skip_bad)
    for file in files:
        for piece in read_file(Path(file), records):
            yield {text_column: piece.text}
    records.report(", ".join(files))


def _share(
    dataset: Any, held_out: int, rank: int, world_size: int, *, by_file: bool
) -> tuple[Any, int, int]:
    """Return what this process reads, the documents before its first, and one in how many it takes.

    Documents are dealt out in turn, so that all processes see the same mixture of the files. With
    `by_file` whole files are, if there are as many for each process. The first `held_out` documents
    are nobody's.
    """
    files = dataset.num_shards
    if not by_file or world_size == 1 or files % world_size:
        return dataset, held_out + rank, world_size
    skipped = 0
    for file in range(files):
        if held_out == 0:
            break
        documents = dataset.shard(files, file)
        count = sum(1 for _ in itertools.islice(documents, held_out))
        held_out -= count
        skipped += count if file % world_size == rank else 0
    return dataset.shard(world_size, rank, contiguous=False), skipped, 1


def _first_texts(rows: Any, records: Records, name: str, count: int) -> list[tuple[str, int]]:
    """Return the first `count` texts, or fewer that are long enough, each with its row's number.

    Rows without text are left out, as they are in training.
    """
    found: list[tuple[str, int]] = []
    for piece in pieces_of(rows, records, name):
        if piece.text:
            found.append((piece.text, records.read))
        if len(found) == count or _characters(found) >= VALIDATION_CHARACTERS:
            break
    return found


def _characters(found: list[tuple[str, int]]) -> int:
    return sum(len(text) for text, _ in found)
