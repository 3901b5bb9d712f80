"""Evaluation of a model on held-out rows: perplexity, accuracy and exact match."""

import math
from collections.abc import Callable, Iterable, Iterator
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
            compared; None if `num_bytes` was not given or is 0.
        accuracy: share of the targets to which the model gave the highest logit.
        exact_match: share of the rows with targets in which it did so for every target; None for
            packed documents.
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
    add_parts: Callable[[Tensor], Any] | None = None,
) -> Evaluation:
    """Evaluate a model on all targets of some batches; every target has the same weight.

    Args:
        model: the model, which runs on its own device; the training mode of each of its
            modules is restored at the end.
        batches: tokens and targets on any device; targets of -100 are ignored.
        num_bytes: UTF-8 bytes of the targets' text, for `bits_per_byte`.
        segment_tokens: run this many tokens of every row at a time, and pass the state on. The
            result is the same, and memory stays bounded for rows of any length. None runs rows
            in one piece.
        precision: "fp32", "bf16" (autocast), or "auto", which is "bf16" on a GPU.
        add_up: sums a tensor over all processes, in place, if each evaluates its own batches.
        add_parts: sums a tensor over the processes that share this one's rows, in place, if each
            evaluates its own part of every row.

    Raises:
        ValueError: if there are no targets; if `segment_tokens` is not positive, or is given for
            packed documents, which have no state; or if there is no such precision.
    """
    if segment_tokens is not None and segment_tokens < 1:
        raise ValueError(f"segment_tokens must be at least 1, got {segment_tokens}")
    has_state = segment_tokens is not None
    # Processes that evaluate together run batches of one shape.
    trims = has_state or (add_up is None and add_parts is None)
    rows = (_split(batch, segment_tokens) if trims else [batch] for batch in batches)
    return _evaluate(model, rows, num_bytes, precision, add_up, add_parts, has_state=has_state)


def evaluate_segments(
    model: LM,
    rows: Iterable[Iterable[Batch]],
    *,
    precision: str = "auto",
) -> Evaluation:
    """Evaluate a model on rows that come in segments, of any length, in bounded memory.

    The model's state goes from each segment to the next. A segment without targets is a prefill: it
    does not run through the head.

    Args:
        model: as in `evaluate`.
        rows: each item yields the consecutive segments of some rows, with as many rows in all of
            them. A segment is taken when it is needed, and none is kept.
        precision: as in `evaluate`.

    Raises:
        ValueError: if there are no targets, the segments of an item differ in their rows, or there
            is no such precision.
    """
    return _evaluate(model, rows, None, precision, None, None, has_state=True)


def _split(batch: Batch, segment_tokens: int | None) -> Iterator[Batch]:
    """Yield a batch's segments; if they have no length, it is one.

    Rows without targets, and what comes after the last target, are left out: in a short text they
    may be nearly all. A batch in one piece keeps them if they are less than half of it, so that the
    result equals that of a training to the bit.
    """
    if batch.cu_seqlens is not None:
        if segment_tokens is not None:
            raise ValueError("segment_tokens must be None where documents are packed")
        yield batch
        return
    is_target = batch.targets != NO_TARGET
    rows, columns = is_target.any(1), is_target.any(0)
    length = int(columns.nonzero().max()) + 1 if columns.any() else 0
    if segment_tokens is None and 2 * int(rows.sum()) * length > is_target.numel():
        yield batch
        return
    parts = (part[rows, :length] for part in (batch.tokens, batch.targets))
    yield from map(Batch, *(part.split(segment_tokens or max(length, 1), 1) for part in parts))


def _evaluate(
    model: LM,
    rows: Iterable[Iterable[Batch]],
    num_bytes: int | None,
    precision: str,
    add_up: Callable[[Tensor], Any] | None,
    add_parts: Callable[[Tensor], Any] | None,
    *,
    has_state: bool,
) -> Evaluation:
    """Sum the scores of all rows, which come in one piece each if `has_state` is False."""
    device = next(model.parameters()).device
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            for segments in rows:
                sums += _score_rows(
                    model, segments, precision, device, add_parts, has_state=has_state
                )
    finally:
        for module in training:  # and not model.train(), which would change all its modules
            module.training = True
    if add_up is not None:
        add_up(sums)
    total, count, hits, rows, right = sums.tolist()
    if count == 0:
        raise ValueError("an evaluation needs at least one target that is not -100")
    loss = total / count
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=total / math.log(2) / num_bytes if num_bytes else None,
        accuracy=hits / count,
        exact_match=right / rows if rows else None,
        tokens=int(count),
    )


def _score_rows(
    model: LM,
    segments: Iterable[Batch],
    precision: str,
    device: torch.device,
    add_parts: Callable[[Tensor], Any] | None,
    *,
    has_state: bool,
) -> Tensor:
    """Return nats, targets and hits; and how many rows have targets, and how many hit them all."""
    sums = torch.zeros(5, dtype=torch.float64, device=device)
    state: Any = None
    is_asked = is_right = torch.zeros(0, dtype=torch.bool, device=device)
    is_first, is_packed = True, False
    for batch in segments:
        is_packed = batch.cu_seqlens is not None
        is_prefill = has_state and not (batch.targets != NO_TARGET).any()
        tokens, targets, borders, _ = move_batch(batch, device)
        if is_first:
            state = model.init_state(len(tokens)) if has_state else None
            is_asked = torch.zeros(len(tokens), dtype=torch.bool, device=device)
            is_first, is_right = False, ~is_asked
        elif len(tokens) != len(is_asked):
            raise ValueError(
                f"segments must have the same rows, got {len(tokens)} after {len(is_asked)}"
            )
        if is_prefill and tokens.shape[1] == 0:
            continue
        with autocast(device, precision):
            if is_prefill:
                state = model(tokens, state, last_only=True).state
                continue
            loss, count, hits, state = model.score(tokens, targets, borders, state=state)
        sums[:3] += torch.stack([loss.double(), count, hits.sum()])
        is_asked = is_asked | (targets != NO_TARGET).any(1)
        is_right = is_right & (hits | (targets == NO_TARGET)).all(1)
    if not is_packed:
        told = torch.stack([is_asked, ~is_right]).long()
        if add_parts is not None:
            add_parts(told)
        is_asked, is_wrong = told > 0
        sums[3:] += torch.stack([is_asked.sum(), (is_asked & ~is_wrong).sum()])
    return sums
