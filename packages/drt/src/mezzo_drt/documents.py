"""Trains on long documents and evaluates with context of several lengths, as Table 1 does."""

from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from mezzo_core.bench.training import outcome
from mezzo_core.data.tokenized_corpus import token_store
from mezzo_core.eval.evaluate import evaluate
from mezzo_core.eval.sliding import sliding_windows
from mezzo_core.nn.checkpoint import load_model
from mezzo_core.train.config import TrainConfig

ROW = 4
"""Tokens of an evaluated row, in windows of the longest length."""


def train_on_documents(
    config: TrainConfig, lengths: Mapping[str, int], folder: Path, device: torch.device
) -> dict[str, Any]:
    """Train a model, then evaluate it in windows of each length, by their names.

    All lengths have the same targets. A window begins half its length after the one before, so that
    but for the first tokens of a row, at least half a window is before each target.

    Returns:
        What `outcome` gives; its perplexity is replaced by `perplexities`, by the lengths' names.
    """
    found = outcome(config, folder, device)
    failed = found.pop("perplexity")
    if isinstance(failed, str):
        return found | {"perplexities": dict.fromkeys(lengths, failed)}
    model, _, _ = load_model(folder / "model", device=device)
    text = config.data.build(ROW * max(lengths.values()), token_store())
    found["perplexities"] = {}
    for name, T in lengths.items():
        rows = islice(text.validation_batches(ROW), config.eval_batches)
        windows = (window for batch in rows for window in sliding_windows(batch, T, T // 2))
        precision = config.precision
        found["perplexities"][name] = evaluate(model, windows, precision=precision).perplexity
    return found
