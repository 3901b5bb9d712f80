"""The corpus that comes with the package: three novels by Jane Austen, in the public domain.

`austen.txt.xz` holds *Northanger Abbey* (1817), *Persuasion* (1817) and *Pride and Prejudice*
(1813): 1.6 MB of plain ASCII. A document is a chapter, 116 in all, so that a split by document
keeps whole chapters for validation. The text before the first chapter of a novel (its title, an
advertisement) belongs to that chapter.
"""

import itertools
import lzma
import re
from collections.abc import Iterator
from importlib.resources import files

_NOVEL = re.compile(r"^(?=(?:NORTHANGER ABBEY|Persuasion|PRIDE AND PREJUDICE)$)", re.MULTILINE)
_CHAPTER = re.compile(r"^chapter \d+$", re.MULTILINE | re.IGNORECASE)


def embedded_bytes() -> bytes:
    """Return the compressed corpus file of the package."""
    return files("mezzo_core.data").joinpath("austen.txt.xz").read_bytes()


def embedded_documents() -> Iterator[str]:
    """Yield the chapters in order; joined, they give the whole text."""
    text = lzma.decompress(embedded_bytes()).decode("utf-8")
    for novel in filter(None, _NOVEL.split(text)):
        starts = [match.start() for match in _CHAPTER.finditer(novel)]
        borders = [0, *starts[1:], len(novel)]
        for begin, end in itertools.pairwise(borders):
            yield novel[begin:end]
