"""What a DRT costs: the bytes of its state and its FLOPs. These are methods of `DRT`."""

from typing import TYPE_CHECKING

from mezzo_drt.encoder import num_weights

if TYPE_CHECKING:
    from mezzo_drt.stack import DRT


def state_bytes(stack: "DRT", num_tokens: int) -> int:
    """Return the bytes of state of one sequence; only those of complete chunks grow for ever.

    A chunk takes its key of retrieval and, without offload, its keys and values, in the dtype of
    the weights. A state that grows in place may have room for twice the chunks.
    """
    c, C, size = stack.config, stack.d_model, stack.landmark.weight.element_size()
    chunks, num_read = num_tokens // c.chunk_size, c.num_groups * c.num_retrieved
    caches = sum(a.state_bytes(num_tokens + chunks) for a in stack.layers())
    channels = (c.chunk_size + 1 + chunks) * C
    channels += 2 * (num_read if c.offload else chunks) * c.chunk_size * C
    return caches + channels * size + num_read * (8 + 4)


def host_state_bytes(stack: "DRT", num_tokens: int) -> int:
    """Return the bytes of the chunks' keys and values if they are offloaded, else 0."""
    L, size = stack.config.chunk_size, stack.landmark.weight.element_size()
    return 2 * (num_tokens // L) * L * stack.d_model * size if stack.config.offload else 0


def flops_per_token(stack: "DRT", num_tokens: int) -> float:
    """Return the forward FLOPs per token: all layers over all places, encoder and retrieval.

    Of the encoder, complete chunks are counted.
    """
    c, L, N = stack.config, stack.config.chunk_size, num_tokens // stack.config.chunk_size
    places = num_tokens + N
    total = places * sum(block.flops_per_token(places) for block in stack.lower.blocks)
    total += sum(layer.flops(num_tokens, L, c.num_retrieved) for layer in stack.upper)
    total += N * (stack.encoder.flops_per_chunk(L) + 2 * num_weights(stack.queries))
    return (total + c.num_groups * stack.d_model * N * (N - 1)) / max(num_tokens, 1)
