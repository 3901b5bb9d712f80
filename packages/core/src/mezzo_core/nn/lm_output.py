"""What calls of a language model return."""

from typing import Any, NamedTuple

from torch import Tensor


class LMOutput(NamedTuple):
    """What a call of the model returns."""

    logits: Tensor
    """(B, T, vocab), or (B, 1, vocab) with `last_only`."""
    state: Any
    """The stack's state after the last real token; None if none was given."""


class Score(NamedTuple):
    """How well a model predicts the targets that count."""

    loss: Tensor
    """Cross entropy in nats, summed, float32."""
    targets: Tensor
    """Their number, int64."""
    hits: Tensor
    """Where the target is the model's likeliest token, (B, T) bool."""
    state: Any
    """The stack's state after the last real token; None if none was given."""
