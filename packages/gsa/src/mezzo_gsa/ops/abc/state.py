"""ABC's state, and the result of its ops."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class ABCState(NamedTuple):
    """The state of each sequence: M slots a head, float32 (float64 for float64 inputs)."""

    k: Float[Tensor, "S H M K"]
    v: Float[Tensor, "S H M V"]
    z: Float[Tensor, "S H M"]
    """Log of the sum of exp(s) so far; -inf before the first token."""


def shapes_of(slots: tuple[int, ...], k: Tensor, v: Tensor) -> list[tuple[int, ...]]:
    """Return the shapes of a state of (S, H, M) slots, for k (..., K) and v (..., V)."""
    return [(*slots, k.shape[-1]), (*slots, v.shape[-1]), slots]


class ABCOutput(NamedTuple):
    """What `chunk_abc` and `recurrent_abc` return."""

    out: Float[Tensor, "B T HQ V"]
    final_state: ABCState
