"""Evaluation of a model on held-out rows: perplexity and accuracy."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mezzo_core.data import Batch
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
        tokens: number of targets.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    accuracy: float
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
    sums = torch.zeros(3, dtype=torch.float64, device=device)  # nats, targets, hits
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                tokens, targets, borders = move_batch(batch, device)
                if segment_tokens is not None and borders is not None:
                    raise ValueError("segment_tokens is for rows, and these documents are packed")
                size = segment_tokens or max(tokens.shape[1], 1)
                state = None if segment_tokens is None else model.init_state(len(tokens))
                for segment, its_targets in zip(
                    tokens.split(size, 1), targets.split(size, 1), strict=True
                ):
                    with autocast(device, precision):
                        *found, state = model.score(segment, its_targets, borders, state=state)
                    sums += torch.stack([value.double() for value in found])
    finally:
        model.train(was_training)
    if add_up is not None:
        add_up(sums)
    total, count, hits = sums.tolist()
    if count == 0:
        raise ValueError("an evaluation needs at least one target that is not -100")
    loss = total / count
    return Evaluation(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=None if num_bytes is None else total / math.log(2) / num_bytes,
        accuracy=hits / count,
        tokens=int(count),
    )
