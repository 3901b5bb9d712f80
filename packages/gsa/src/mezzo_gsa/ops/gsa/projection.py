"""The parts of a projection, which are side by side: q, k, v and the logits of the gates."""

from typing import NamedTuple

from torch import Tensor

from mezzo_gsa.ops.gsa.state import GSAState


class Parts(NamedTuple):
    """q (B, T, HQ, K), k (B, T, H, K), v (B, T, H, V), g (B, T, H, M); without T in a step."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor


class Projection(NamedTuple):
    """The numbers of heads and slots of a projection (B, T, W).

    Each head of q, k and v has D = (W - H M) / (HQ + 2 H) channels.
    """

    num_heads: int
    num_kv_heads: int
    num_slots: int

    def split(self, x: Tensor) -> Parts:
        """Return q, k, v and the logits as views of x (B, T, W)."""
        HQ, H, M = self
        D = (x.shape[2] - H * M) // (HQ + 2 * H)
        q, k, v, g = x.split([HQ * D, H * D, H * D, H * M], dim=2)
        q, k, v = (part.unflatten(2, (-1, D)) for part in (q, k, v))
        return Parts(q, k, v, g.unflatten(2, (-1, M)))


PROJECTION_SCHEMA = "int num_heads, int num_kv_heads, int num_slots"
"""The fields of `Projection`, as the schema of a registered op declares them."""


def split_step(x: Tensor, state: GSAState, num_heads: int, gate_logits: Tensor | None) -> Parts:
    """Return the parts of x (B, W), one token of each row, as views, with the sizes of the state.

    The gate logits are the given ones (H·M,), the same for all rows, or else the last part of x.
    """
    _, H, M, K = state.k.shape
    V = state.v.shape[3]
    widths = [num_heads * K, H * K, H * V]
    if gate_logits is None:
        q, k, v, logits = x.split([*widths, H * M], dim=-1)
    else:
        q, k, v = x.split(widths, dim=-1)
        logits = gate_logits.expand(x.shape[0], -1)
    return Parts(
        q.unflatten(-1, (num_heads, K)),
        k.unflatten(-1, (H, K)),
        v.unflatten(-1, (H, V)),
        logits.unflatten(-1, (H, M)),
    )
