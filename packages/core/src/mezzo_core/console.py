"""Prints what commands say, literally: no text is markup, and none can move the cursor."""

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import chain, islice
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mezzo_core.errors import printable

if TYPE_CHECKING:
    from mezzo_core.data.stream_decoder import StreamDecoder


def show(text: str, console: Console | None = None, *, style: str = "") -> None:
    """Print a text on the console (None: standard output)."""
    (console or Console()).print(Text(printable(text), style), soft_wrap=True)


if_read = suppress(OSError, SystemExit)
"""For messages whose reader may be gone: a closed terminal is an OSError, and rich exits on a
closed pipe."""


def complain(text: str, *, style: str = "") -> None:
    """Print a text on standard error, if somebody reads it."""
    with if_read:
        show(text, Console(stderr=True), style=style)


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on standard output; names in the first column are never wrapped."""
    table = Table(Column(header[0], no_wrap=True), *header[1:])
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)


def write_continued(
    texts: Sequence[str], decoders: "Sequence[StreamDecoder]", steps: Iterator[list[int | None]]
) -> None:
    """Write the texts with their continuations; a single one as it comes, several at the end."""
    steps = chain(list(islice(steps, 1)), steps)  # if the first step raises, nothing is shown
    if len(texts) == 1:
        _write(texts[0])
        try:
            for (token,) in steps:
                _write(decoders[0].push(token))
        finally:  # also after an error: end the line, so that a message gets a line of its own
            _write(decoders[0].flush() + "\n")
        return
    written = [[text] for text in texts]
    for step in steps:
        for parts, decoder, token in zip(written, decoders, step, strict=True):
            parts.append(decoder.push(token))
    for parts, decoder in zip(written, decoders, strict=True):
        _write("".join(parts) + decoder.flush() + "\n\n")


def _write(text: str) -> None:
    shown = printable(text) if sys.stdout and sys.stdout.isatty() else text
    print(shown, end="", flush=True)  # noqa: T201 (nothing where standard output is closed)
