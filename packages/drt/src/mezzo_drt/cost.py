"""What a `DRT` costs: the bytes of its state, on the device and in the host's memory, and FLOPs."""

from collections.abc import Sequence
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

    Landmarks are counted with the tokens before them. A chunk scores half of all chunks on
    average, and reads R. An outside encoder is not counted.
    """
    c, C, L = stack.config, stack.d_model, stack.config.chunk_size
    N = num_tokens / L
    places = (L + 1) / L
    attention = sum(a.flops_per_token(round(num_tokens * places)) for a in stack.attentions())
    rest = [block.mlp for block in stack.lower]
    rest += [m for layer in stack.upper for m in (layer.wq, layer.wo, layer.mlp)]
    reading = len(stack.upper) * 4 * C * L * min(c.num_retrieved, N / 2)
    encoder = stack.encoder
    encoding = 2 * _weights([encoder.layers]) + len(encoder.layers) * 4 * C * (L + 1)
    every_place = attention + 2 * _weights(rest) + reading + encoding
    every_chunk = 2 * _weights([stack.queries, *([] if encoder.wl is None else [encoder.wl])])
    scores = c.num_groups * 2 * C * N / 2
    every_token = 2 * _weights([encoder.wk, encoder.wv])
    return places * every_place + every_token + (every_chunk + scores) / L


def _weights(modules: Sequence[nn.Module]) -> int:
    return sum(weight.numel() for module in modules for weight in module.parameters())
