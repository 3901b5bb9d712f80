"""Evaluation of a model on held-out rows: perplexity, accuracy and exact match."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo_core.data import NO_TARGET, Batch
from mezzo_core.device import autocast, move_batch
from mezzo_core.nn.lm import LM


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation.

    Attributes:
        loss: mean cross entropy of a target, in nats.
        perplexity: exp(loss); inf if that overflows.
        bits_per_byte: bits per byte of text, by which models with different tokenizers can be
            compared; None if `num_bytes` was not given.
        accuracy: share of the targets to which the model gave the highest logit.
        exact_match: share of the rows in which it did so for every target, of those that have one;
            None for packed documents.
        tokens: number of targets.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    accuracy: float
    exact_match: float | None
    tokens: int


def evaluate(
    model: LM,
    batches: Iterable[Batch],
    *,
    num_bytes: int | None = None,
    segment_tokens: int | None = None,
    precision: str = "auto",
    add_up: Callable[[Tensor], Any] | None = None,
) -> Evaluation:
    """Evaluate a model on all targets of some batches; every target has the same weight.

    Args:
        model: the model, which runs on its own device; its training mode is restored at the end.
        batches: tokens and targets on any device; targets of -100 are ignored.
        num_bytes: UTF-8 bytes of the targets' text, for `bits_per_byte`.
        segment_tokens: run this many tokens of every row at a time, and pass the state on. The
            result is the same, and memory stays bounded for rows of any length. None runs whole
            rows.
        precision: "fp32", "bf16" (autocast), or "auto", which is "bf16" on a GPU.
        add_up: sums a tensor over all processes, in place, if each evaluates its own batches.

    Raises:
        ValueError: if there are no targets; or if `segment_tokens` is not positive, or is given for
            packed documents, which have no state.
    """
    if segment_tokens is not None and segment_tokens < 1:
        raise ValueError(f"segment_tokens must be at least 1, got {segment_tokens}")
    device = next(model.parameters()).device
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                sums += _score_rows(model, move_batch(batch, device), segment_tokens, precision)
    finally:
        model.train(was_training)
    if add_up is not None:
        add_up(sums)
    total, count, hits, rows, right = sums.tolist()
    if count == 0:
        raise ValueError("an evaluation needs at least one target that is not -100")
    loss = total / count
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=None if num_bytes is None else total / math.log(2) / num_bytes,
        accuracy=hits / count,
        exact_match=right / rows if rows else None,
        tokens=int(count),
    )


def _score_rows(model: LM, batch: Batch, segment_tokens: int | None, precision: str) -> Tensor:
    """Return nats, targets, hits; rows with a target, and those of them in which all are hits."""
    tokens, targets, borders = batch
    if segment_tokens is not None and borders is not None:
        raise ValueError("segment_tokens is for rows, and these documents are packed")
    size = segment_tokens or max(tokens.shape[1], 1)
    state = None if segment_tokens is None else model.init_state(len(tokens))
    sums = torch.zeros(5, dtype=torch.float64, device=tokens.device)
    is_asked = (targets != NO_TARGET).any(1)
    is_right = is_asked
    for segment, its_targets in zip(tokens.split(size, 1), targets.split(size, 1), strict=True):
        with autocast(tokens.device, precision):
            loss, count, hits, state = model.score(segment, its_targets, borders, state=state)
        sums[:3] += torch.stack([loss.double(), count, hits.sum()])
        is_right = is_right & (hits | (its_targets == NO_TARGET)).all(1)
    if borders is None:
        sums[3:] += torch.stack([is_asked.sum(), is_right.sum()])
    return sums
