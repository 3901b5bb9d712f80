"""What commands print: each text as it is, in which nothing is markup or moves the cursor."""

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from mezzo_core.errors import printable


def show(text: str, console: Console | None = None, *, style: str = "") -> None:
    """Print a text, such as one with a path in it, on the console (None: standard output)."""
    (console or Console()).print(Text(printable(text), style), soft_wrap=True)


def show_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table on standard output."""
    table = Table(*header)
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))
    Console().print(table)
