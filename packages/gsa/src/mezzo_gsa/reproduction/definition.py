"""GSA's equations written again with loops, to check the ops for the report.

This shares no code with `mezzo_gsa.ops`, so a common mistake is unlikely.
"""

import torch
from torch import Tensor


def gsa_by_definition(q: Tensor, k: Tensor, v: Tensor, alpha: Tensor) -> Tensor:
    """Compute section 3.1's recurrence slot by slot.

    Args:
        q: (T, H, D) queries.
        k: (T, H, D) keys.
        v: (T, H, D) values.
        alpha: (T, H, M) forget gates, in [0, 1].

    Returns:
        (T, H, D), in the dtype of v.
    """
    T, H, D = v.shape
    M = alpha.shape[-1]
    outputs = torch.zeros_like(v)
    for h in range(H):
        keys, values = v.new_zeros(M, D), v.new_zeros(M, D)
        for t in range(T):
            for i in range(M):
                keep = alpha[t, h, i]
                keys[i] = keep * keys[i] + (1 - keep) * k[t, h]
                values[i] = keep * values[i] + (1 - keep) * v[t, h]
            weights = torch.exp(keys @ q[t, h])
            outputs[t, h] = (weights / weights.sum()) @ values
    return outputs
