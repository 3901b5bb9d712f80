"""Evaluates on long documents with context of several lengths, as Table 1 does."""

from collections.abc import Mapping
from itertools import islice

from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.eval.sliding import sliding_windows
from mezzo_core.nn.lm import LM
from mezzo_core.train.config import TrainConfig

ROW = 4
"""Tokens of an evaluated row, in windows of the longest length."""


def perplexities(model: LM, config: TrainConfig, *, lengths: Mapping[str, int]) -> dict[str, float]:
    """Evaluate the model of a run in windows of each length, by their names.

    All lengths have the same targets. A window begins half its length after the one before, so that
    but for the first tokens of a row, at least half a window is before each target.
    """
    text, found = config.data.build(ROW * max(lengths.values()), token_store()), {}
    for name, T in lengths.items():
        rows = islice(text.validation_batches(ROW), config.eval_batches)
        windows = (window for batch in rows for window in sliding_windows(batch, T, T // 2))
        found[name] = evaluate(model, windows, precision=config.precision).perplexity
    return found
