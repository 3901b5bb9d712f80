"""Random inputs of recurrent layers, and the op as a function of them."""

from itertools import accumulate

import torch
from mezzo_recurrent_transformer.ops.recurrent_layers import LayerWeights, Past, recurrent_layers


def problem(case, n=2, H=2, D=4, F=12, *, norm="rms", alibi=True, dtype=torch.float64, seed=0):
    """Random inputs by name, the options of the call, and gradients of its outputs."""
    B, T, given = case
    draw, C = torch.Generator().manual_seed(seed), H * D

    def normal(*shape):
        return torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype)

    # Without norms a recurrence with large weights explodes.
    std = 0.4 if norm == "none" else 1.0
    inputs = {"x": normal(B, T, C)}
    inputs |= {name: normal(n, C, C) * std * C**-0.5 for name in ("wq", "wk", "wv", "wo")}
    inputs |= {"up": normal(n, F, C) * C**-0.5, "down": normal(n, C, F) * std * F**-0.5}
    if norm != "none":
        inputs |= {k: 1 + 0.3 * normal(n, C) for k in ("n1", "n2", "q_norm", "k_norm")}
    options = {"num_heads": H, "norm": norm, "residual_scale": 0.7, "eps": 1e-3}
    options["alibi_slopes"] = torch.tensor([0.5, 0.03, 0.1])[:H] if alibi else None
    pull = (normal(B, T, C),)
    if (seen := given.get("seen")) is not None:
        P = max(seen) + 1
        inputs |= {"k": normal(n, B, P, H, D), "v": normal(n, B, P, H, D)}
        options["seen"] = torch.tensor(seen)
        pull = *pull, normal(n, B, P + T, H, D), normal(n, B, P + T, H, D)
    if (real := given.get("real")) is not None:
        options["lengths"] = torch.tensor(real)
    if (packed := given.get("packed")) is not None:
        options["cu_seqlens"] = torch.tensor([0, *accumulate(packed)])
    return inputs, options, pull


def layers(impl="eager", *, seen=None, **options):
    """The op as a function of tensors by name: z and the pairs, 0 in padding and unused slots."""

    def call(x, k=None, v=None, **weights):
        past = None if k is None else Past(k, v, seen)
        z, after = recurrent_layers(x, LayerWeights(**weights), past=past, impl=impl, **options)
        if after is None:
            return (z,)
        if (real := options.get("lengths")) is not None:
            z = z.masked_fill((torch.arange(z.shape[1]) >= real[:, None])[..., None], 0)
        unused = torch.arange(after.k.shape[2]) >= after.lengths[:, None]
        return z, *(t.masked_fill(unused[..., None, None], 0) for t in (after.k, after.v))

    return call
