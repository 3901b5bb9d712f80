"""Sliding windows: long rows for models that see no further than the rows they were trained on."""

from collections.abc import Iterator

from mezzo_core.data import NO_TARGET, Batch
from mezzo_core.ops.checks import check_size


def sliding_windows(batch: Batch, window_size: int, stride: int) -> Iterator[Batch]:
    """Cut rows into windows that overlap, and ask for each target in one of them.

    A window begins `stride` tokens after the one before, and asks for what that one has not asked
    for. So every target but those of the first window has at least `window_size - stride` tokens
    before its own in its window: the shorter the stride, the better the context and the dearer the
    evaluation. `evaluate(model, windows)` then gives the perplexity of the rows, without a state.

    Args:
        batch: rows of T tokens.
        window_size: tokens of a window; rows that are shorter are one window.
        stride: from 1 to `window_size`.

    Yields:
        (B, window_size) each. The last window ends with the row.

    Raises:
        TypeError: if a size is not an int.
        ValueError: if a size is out of range, or the batch has packed documents.
    """
    check_size("sliding_windows", "window_size", window_size)
    check_size("sliding_windows", "stride", stride)
    if stride > window_size:
        raise ValueError(f"stride must be at most window_size, {window_size}, got {stride}")
    if batch.cu_seqlens is not None:
        raise ValueError("sliding_windows takes rows, and this batch has packed documents")
    num_tokens = batch.tokens.shape[1]
    asked = 0
    while asked < num_tokens:
        end = min(asked + (stride if asked else window_size), num_tokens)
        begin = max(end - window_size, 0)
        targets = batch.targets[:, begin:end].clone()
        targets[:, : asked - begin] = NO_TARGET
        yield Batch(batch.tokens[:, begin:end], targets)
        asked = end
