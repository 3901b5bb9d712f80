"""The text around needles, and words: those of the embedded novels."""

import re
from collections import Counter
from functools import cache

from mezzo_core.data.embedded import embedded_documents

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


@cache
def prose() -> tuple[str, ...]:
    """Return the words of the novels, with what stands at their ends, in their order."""
    return tuple(" ".join(embedded_documents()).split())


@cache
def words() -> tuple[str, ...]:
    """Return the plain words of the novels in the order of the alphabet.

    They have 4 to 10 letters, and come in small letters three times or more.
    """
    counts = Counter(re.findall(r"\b[a-z]{4,10}\b", " ".join(prose())))
    return tuple(sorted(word for word, count in counts.items() if count >= 3))


def sentences(text: str) -> list[str]:
    """Cut a text after its full stops, exclamation marks and question marks."""
    return re.split(r"(?<=[.!?])\s+", text.strip())
