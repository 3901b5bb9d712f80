"""GSA's state, and the result of its ops."""

from typing import NamedTuple

from jaxtyping import Float
from torch import Tensor


class GSAState(NamedTuple):
    """K~ and V~ of each sequence: M slots a head, float32 (float64 for float64 inputs)."""

    k: Float[Tensor, "S H M K"]
    v: Float[Tensor, "S H M V"]


class GSAOutput(NamedTuple):
    """What `chunk_gsa` and `recurrent_gsa` return."""

    out: Float[Tensor, "B T HQ V"]
    final_state: GSAState
