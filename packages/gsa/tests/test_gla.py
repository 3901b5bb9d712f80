"""The GLA mixer: its definition, its sizes and its costs."""

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.nn.init import init_weights
from mezzo_core.testing import assert_close
from mezzo_gsa.gla import GLAConfig

C = 16


def test_it_is_the_definition():
    torch.manual_seed(0)
    mixer = GLAConfig(num_heads=1, expand_k=0.5).build(8).double()
    init_weights(mixer, std=0.5)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    # By separate products, with the weights in the order of the docstring.
    wq, wk, wv, wz, w1 = mixer.in_proj.weight.split([4, 4, 8, 8, 16])
    q, k, v, z = (x[0] @ w.T for w in (wq, wk, wv, wz))
    alpha = torch.sigmoid(x[0] @ w1.T @ mixer.g_proj.weight.T + mixer.g_proj.bias) ** (1 / 16)
    S, outs = torch.zeros(4, 8, dtype=torch.float64), []
    for t in range(6):
        S = alpha[t, :, None] * S + torch.outer(k[t], v[t])
        outs.append(S.T @ q[t] / 2)  # K = 4
    o = torch.stack(outs)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_close("y", mixer(x)[0][0], mixer.out_proj(o * F.silu(z)), rtol=1e-6)


def test_without_an_output_gate_heads_are_normalized_and_queries_and_keys_rectified():
    config = GLAConfig(num_heads=1, expand_k=1.0, feature_map="relu", output_gate=False)
    mixer = config.build(4)
    with torch.no_grad():
        wq, wk, wv, _ = mixer.in_proj.weight.split([4, 4, 4, 16])
        wq.copy_(torch.eye(4))
        wk.copy_(torch.eye(4))
        wv.copy_(3 * torch.eye(4))
        mixer.out_proj.weight.copy_(torch.eye(4))
    x = torch.tensor([[[1.0, -2.0, 1.0, 1.0]]])  # q·k = 3 without the negative channel
    v = 3 * x
    out = v * 3 / 2
    expected = out / (out.square().mean() + 1e-6).sqrt()
    assert_close("y", mixer(x)[0], expected, rtol=1e-6)
    assert mixer(-x.abs())[0].abs().max() == 0, "no channel is left"


def test_a_layer_of_the_paper_has_four_squares_and_256_d_numbers_of_state():
    with torch.device("meta"):
        mixer = GLAConfig(num_heads=4).build(2048)
    square = 2048**2
    gate = 16 * (2048 + 1024) + 1024
    assert sum(p.numel() for p in mixer.parameters()) == 4 * square + gate + 512  # norm: V
    assert mixer.heads == (4, 4, 256, 512)
    assert mixer.state_bytes(1) == mixer.state_bytes(10**6) == 4 * 256 * 2048


def test_flops_are_the_weights_twice_and_the_state_five_times():
    with torch.device("meta"):
        mixer = GLAConfig(num_heads=4, num_kv_heads=2).build(2048)
    weights = 2048 * (1024 + 512 + 1024 + 2048 + 2048) + 16 * (2048 + 512)
    state = 3 * 2 * 256 * 512 + 2 * 4 * 256 * 512
    assert mixer.flops_per_token(7) == 2 * weights + state + 2048


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GLAConfig(num_heads=3), "expand_k must give each head, of num_heads = 3, a whole number"),
        (GLAConfig(expand_v=0.3), "expand_v must give each head, of num_heads = 4, a whole number"),
        (GLAConfig(num_kv_heads=3), "num_kv_heads must divide num_heads = 4, got 3"),
        (GLAConfig(gate_rank=0), "gate_rank must be 1 or more, got 0"),
        (GLAConfig(damping=0.0), "damping must be positive and finite, got 0"),
        (GLAConfig(feature_map="gelu"), r"feature_map must be one of \('relu',\), got 'gelu'"),
    ],
)
def test_impossible_configurations_are_refused_when_they_are_built(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)
