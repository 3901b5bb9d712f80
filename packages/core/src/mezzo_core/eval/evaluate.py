"""How well a model predicts held-out rows: their perplexity, and how often it is right."""

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
    """What an evaluation found.

    Attributes:
        loss: cross entropy in nats a target.
        perplexity: exp(loss); inf beyond what a float holds.
        bits_per_byte: bits a byte of text, which models of different tokenizers can be compared
            by; None if the text's bytes were not given.
        accuracy: the share of targets that are the model's likeliest token.
        tokens: how many targets were predicted.
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
    """Predict all targets of some batches, each weighing the same.

    Args:
        model: on the device where it should run; its training mode is kept.
        batches: tokens and targets on any device; targets of -100 do not count.
        num_bytes: UTF-8 bytes of the text whose tokens the targets are.
        segment_tokens: run so many tokens of every row at a time, through the state. The result is
            the same; memory is bounded however long the rows are. None: whole rows.
        precision: "fp32", "bf16" (autocast), or "auto": bf16 on a GPU.
        add_up: adds a tensor up over processes that each bring their own part, in place.

    Raises:
        ValueError: if no target counts, `segment_tokens` is no positive number, or is given for
            batches of packed documents, which have no state.
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
