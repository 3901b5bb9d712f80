"""RAT's equations written again with loops and complex numbers, to check the ops for the report.

This shares no code with `mezzo_rat.ops`, so a common mistake is unlikely.
"""

import torch
from torch import Tensor


def rat_by_definition(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, z: Tensor, *, chunk_size: int, rope_base: float
) -> Tensor:
    """Compute equation 3 of the paper token by token, with RoPE by chunk index.

    Args:
        q: (T, G, D) queries; head h reads group h % G.
        k: (T, G, D) keys.
        v: (T, H, D) values.
        g: (T, H, D) logits of the forget gate.
        z: (T, H, D) logits of the output gate.
        chunk_size: L.
        rope_base: base of RoPE's angles.

    Returns:
        (T, H, D), in the dtype of v.
    """
    T, H, D = v.shape
    frequencies = rope_base ** (-torch.arange(D // 2, dtype=v.dtype) * 2 / D)
    heads = torch.arange(H) % q.shape[1]
    keep = torch.sigmoid(g)
    ends_k: list[Tensor] = []
    ends_v: list[Tensor] = []
    outputs = []
    for t in range(T):
        n = t // chunk_size
        if t % chunk_size == 0:
            run_k, run_v = torch.zeros_like(v[0]), torch.zeros_like(v[0])
        run_k = keep[t] * run_k + (1 - keep[t]) * k[t, heads]
        run_v = keep[t] * run_v + (1 - keep[t]) * v[t]
        keys = [*(_turn(end, i * frequencies) for i, end in enumerate(ends_k))]
        keys.append(_turn(run_k, n * frequencies))
        query = _turn(q[t, heads], n * frequencies)
        logits = torch.stack([(query * key.conj()).real.sum(-1) for key in keys]) / D**0.5
        weights = logits.softmax(0)[..., None]
        outputs.append(torch.sigmoid(z[t]) * (weights * torch.stack([*ends_v, run_v])).sum(0))
        if t % chunk_size == chunk_size - 1:
            ends_k.append(run_k)
            ends_v.append(run_v)
    return torch.stack(outputs)


def _turn(x: Tensor, angles: Tensor) -> Tensor:
    """Rotate (H, D) by (D/2) angles; the halves of D are the real and the imaginary parts."""
    real, imaginary = x.chunk(2, dim=-1)
    return torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)
