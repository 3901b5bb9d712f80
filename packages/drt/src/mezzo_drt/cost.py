"""What a `DRT` costs: the bytes of its state, on the device and in the host's memory, and FLOPs."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from mezzo_drt.stack import DRT


def state_bytes(stack: "DRT", num_tokens: int) -> int:
    """Return the bytes that the state of one sequence takes on the device."""
    c, C, size = stack.config, stack.d_model, stack.landmark.weight.element_size()
    chunks, num_read = num_tokens // c.chunk_size, c.num_groups * c.num_retrieved
    caches = sum(a.state_bytes(num_tokens + chunks) for a in stack.attentions())
    K = 0 if stack.outside is None else stack.outside.width
    lower = (c.chunk_size + 1) * (C + K) * size
    keys = chunks * (K or C) * size
    tokens = 2 * (num_read if c.offload else chunks) * c.chunk_size * C * size
    return caches + lower + keys + tokens + num_read * (8 + 4)


def host_state_bytes(stack: "DRT", num_tokens: int) -> int:
    """Return the bytes that it takes in the host's memory."""
    c, size = stack.config, stack.landmark.weight.element_size()
    chunks = num_tokens // c.chunk_size
    return 2 * chunks * c.chunk_size * stack.d_model * size if c.offload else 0


def flops_per_token(stack: "DRT", num_tokens: int) -> float:
    """Return the forward FLOPs per token: all layers over all places, encoder and retrieval.

    Of the encoder, complete chunks are counted; an outside encoder is not.
    """
    c, C, L = stack.config, stack.d_model, stack.config.chunk_size
    N, rest = divmod(num_tokens, L)
    places = num_tokens + N
    attention = sum(a.flops_per_token(places) for a in stack.attentions()) * places
    others = [block.mlp for block in stack.lower]
    others += [m for layer in stack.upper for m in (layer.wq, layer.wo, layer.mlp)]
    # A chunk reads up to R of those before the last one.
    reads = (L + 1) * _sum_of_smaller(N - 1, c.num_retrieved)
    reads += rest * min(max(N - 1, 0), c.num_retrieved)
    reading = len(stack.upper) * 4 * C * L * reads
    encoder, layers = stack.encoder, stack.encoder.layers
    encoding = N * (L + 1) * (2 * _weights(layers) + len(layers) * 4 * C * (L + 1))
    encoding += N * L * 2 * _weights([encoder.wk, encoder.wv])
    landmarks = N * 2 * _weights([*stack.queries, *([] if encoder.wl is None else [encoder.wl])])
    K = C if stack.outside is None else stack.outside.width
    scores = c.num_groups * 2 * K * N * (N - 1) / 2
    total = attention + 2 * _weights(others) * places + reading + encoding
    return (total + landmarks + scores) / max(num_tokens, 1)


def _sum_of_smaller(count: int, most: int) -> int:
    """Return the sum of min(n, most) for n = 0, 1, ..., count - 1."""
    few = max(min(count, most), 0)
    return few * (few - 1) // 2 + most * (max(count, 0) - few)


def _weights(modules: Iterable[nn.Module]) -> int:
    """Return the number of weights of the matrices; norms are not counted."""
    parts = [part for module in modules for part in module.modules()]
    return sum(part.weight.numel() for part in parts if isinstance(part, nn.Linear))
