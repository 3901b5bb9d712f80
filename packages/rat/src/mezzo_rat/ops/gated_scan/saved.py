"""What the backward of the gated scan needs."""

from typing import NamedTuple

from torch import Tensor


class Saved(NamedTuple):
    """The tensors that the backward needs."""

    zvg: Tensor
    gate_bias: Tensor | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    lengths: Tensor | None
    kept: Tensor
    """(B, N, C) float32: the state before every token t with t % STATE_EVERY == 0."""
