"""The options of the op."""

from typing import NamedTuple


class Form(NamedTuple):
    """The options of grouped cross-attention."""

    softmax1: bool
    """Whether a query may ignore a chunk: its softmax has one more key, of logit and value 0."""
    scale: float
    """Factor of the products of queries and keys."""
