"""Perplexity: how well a model predicts held-out text, a token and a byte at a time."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mezzo_core.data import NO_TARGET, Batch
from mezzo_core.nn.lm import LM
from mezzo_core.train.device import autocast, move_batch
from mezzo_core.train.distributed import World


@dataclass(frozen=True)
class Perplexity:
    """What an evaluation found.

    Attributes:
        loss: cross entropy in nats a token.
        perplexity: exp(loss); inf beyond what a float holds.
        bits_per_byte: bits a byte of text, which models of different tokenizers can be compared
            by; None if the text's bytes were not given.
        tokens: how many tokens were predicted.
    """

    loss: float
    perplexity: float
    bits_per_byte: float | None
    tokens: int


def perplexity(
    model: LM,
    batches: Iterable[Batch],
    *,
    num_bytes: int | None = None,
    precision: str = "auto",
    world: World | None = None,
) -> Perplexity:
    """Measure the loss of a model over all targets of some batches, each weighing the same.

    Args:
        model: on the device where it should run; its training mode is kept.
        batches: tokens and targets on any device; targets of -100 do not count.
        num_bytes: UTF-8 bytes of the text whose tokens the targets are.
        precision: "fp32", "bf16" (autocast), or "auto": bf16 on a GPU.
        world: processes that each bring their own part of every batch; their sums are added.

    Raises:
        ValueError: if no target counts.
    """
    device = next(model.parameters()).device
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in batches:
                tokens, targets, borders = move_batch(batch, device)
                with autocast(device, precision):
                    sums[0] += model.loss(tokens, targets, borders, reduction="sum")
                sums[1] += (targets != NO_TARGET).sum()
    finally:
        model.train(was_training)
    if world is not None:
        world.sum(sums)
    total, count = sums.tolist()
    if count == 0:
        raise ValueError("perplexity needs at least one target that is not -100")
    loss = total / count
    return Perplexity(
        loss=loss,
        perplexity=math.exp(loss) if loss < 700 else math.inf,
        bits_per_byte=None if num_bytes is None else total / math.log(2) / num_bytes,
        tokens=int(count),
    )
