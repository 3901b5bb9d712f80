"""A longer context costs each of our layers what the paper says."""

import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.on_meta import on_meta
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

C, D = 128, 32


def by_torch(mixer, T):
    """Count a forward's FLOPs a token of products; torch counts masked logits in full."""
    # torch's counter has no formula for the fused attention of a CPU. SDPBackend.MATH uses plain
    # matrix products, which it counts.
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        mixer(torch.randn(1, T, C))
    return counter.get_total_flops() / T


@pytest.mark.parametrize("count", [by_torch, lambda mixer, T: mixer.flops_per_token(T)])
def test_flops(count):
    """A longer context costs the RNN nothing, and RAT an L-th of what it costs attention."""

    def added(config):
        mixer = config.build(C)
        return count(mixer, 1024) - count(mixer, 256)

    attention = added(AttentionConfig(head_dim=D))
    assert attention > 0
    assert added(LinearRNNConfig()) == 0
    for L in (16, 64, 128):
        assert added(RATConfig(L, D)) == pytest.approx(attention / L, rel=0.01)


@pytest.mark.parametrize(("T", "printed"), [(8192, 128), (16_384, 256), (32_768, 512)])
def test_reversed_chunks(T, printed):
    """At this chunk size, a power of two, the reversed design costs about as much as RAT(L=64)."""

    def cost(config):
        mixer = on_meta(config, 1024)
        return mixer.flops_per_token(T) - mixer.flops_per_token(1)

    target = cost(RATConfig(64, 64))
    sizes = (2**i for i in range(T.bit_length()))
    assert printed == min(sizes, key=lambda L: abs(cost(RATReversedConfig(L, 64)) - target))
