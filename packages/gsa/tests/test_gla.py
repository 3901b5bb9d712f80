"""The GLA mixer: the contract of a mixer, its definition, its sizes and its costs."""

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.nn.init import init_weights
from mezzo_core.testing import assert_close
from mezzo_core.testing.mixers import (
    check_causal,
    check_packed,
    check_ragged,
    check_segments,
    check_state_bytes,
    check_step,
)
from mezzo_gsa.gla import GLAConfig

C = 16
CONFIGS = [
    GLAConfig(num_heads=2),
    GLAConfig(num_heads=4, num_kv_heads=2, expand_k=1.0, feature_map="relu", output_gate=False),
    GLAConfig(num_heads=1, expand_k=0.25, expand_v=2.0, gate_rank=2, damping=0.1),
]


@pytest.fixture(params=CONFIGS, ids=str)
def mixer(request):
    torch.manual_seed(0)
    mixer = request.param.build(C)
    init_weights(mixer, std=0.5)
    return mixer


def test_it_keeps_every_law_of_a_mixer(mixer):
    check_segments(mixer, d_model=C, num_tokens=14, splits=[3, 0, 5, 1, 5])
    check_causal(mixer, d_model=C, num_tokens=14)
    check_packed(mixer, C, [5, 0, 1, 4, 9, 0])
    check_ragged(mixer, C, [2, 0, 1, 4, 9], 6)
    check_step(mixer, C, [2, 0, 1, 4, 9], 6)
    check_state_bytes(mixer, 5)


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_it_keeps_every_law_on_a_gpu(config):
    torch.manual_seed(0)
    with torch.device("cuda"):
        mixer = config.build(128)
    init_weights(mixer, std=0.2)
    check_segments(mixer, d_model=128, num_tokens=14, splits=[3, 0, 5, 1, 5])
    check_causal(mixer, d_model=128, num_tokens=14)
    check_packed(mixer, 128, [5, 0, 1, 4, 9, 0])
    check_ragged(mixer, 128, [2, 0, 1, 4, 9], 6)
    check_step(mixer, 128, [2, 0, 1, 4, 9], 6)


def test_it_is_the_definition():
    torch.manual_seed(0)
    mixer = GLAConfig(num_heads=1, expand_k=0.5).build(8).double()
    init_weights(mixer, std=0.5)
    x = torch.randn(1, 6, 8, dtype=torch.float64)
    q, k, v, z = (p(x)[0] for p in (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.z_proj))
    alpha = torch.sigmoid(mixer.g_proj(x)[0]) ** (1 / 16)
    S, outs = torch.zeros(4, 8, dtype=torch.float64), []
    for t in range(6):
        S = alpha[t, :, None] * S + torch.outer(k[t], v[t])
        outs.append(S.T @ q[t] / 2)  # K = 4
    o = torch.stack(outs)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close("y", mixer(x)[0][0], mixer.o_proj(o * F.silu(z)), rtol=1e-6)


def test_without_an_output_gate_heads_are_normalized_and_queries_and_keys_rectified():
    config = GLAConfig(num_heads=1, expand_k=1.0, feature_map="relu", output_gate=False)
    mixer = config.build(4)
    assert mixer.z_proj is None
    with torch.no_grad():
        mixer.q_proj.weight.copy_(torch.eye(4))
        mixer.k_proj.weight.copy_(torch.eye(4))
        mixer.v_proj.weight.copy_(3 * torch.eye(4))
        mixer.o_proj.weight.copy_(torch.eye(4))
    x = torch.tensor([[[1.0, -2.0, 1.0, 1.0]]])  # q·k = 3 without the negative channel
    v = 3 * x
    out = v * 3 / 2
    expected = out / (out.square().mean() + 1e-5).sqrt()
    assert_close("y", mixer(x)[0], expected, rtol=1e-6)
    rectified = x.clone()
    rectified[0, 0, 1] = 0.0
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


def test_gradients_reach_every_weight(mixer):
    mixer(torch.randn(2, 9, C))[0].square().sum().backward()
    for name, weight in mixer.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_bfloat16_weights_give_bfloat16_outputs_and_a_float32_state():
    mixer = GLAConfig().build(C).bfloat16()
    x = torch.randn(2, 6, C, dtype=torch.bfloat16)
    with torch.no_grad():
        y, state = mixer(x, mixer.init_state(2))
        stepped = mixer.step(x[:, :1], state)
    assert y.dtype == stepped.dtype == torch.bfloat16
    assert state.h.dtype == torch.float32


def test_autocast_steps_equal_the_whole(mixer):
    x = torch.randn(2, 11, C)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        whole, _ = mixer(x)
        first, state = mixer(x[:, :6], mixer.init_state(2))
        rest = [mixer.step(x[:, t : t + 1], state) for t in range(6, 11)]
    assert_close("steps", torch.cat([first, *rest], 1), whole, rtol=2e-2)


def test_a_step_refuses_what_it_cannot_do(mixer):
    with torch.no_grad(), pytest.raises(ValueError, match="one token of each row, got 3"):
        mixer.step(torch.randn(2, 3, C), mixer.init_state(2))
    with pytest.raises(RuntimeError, match="overwrites the state, so it has no gradients"):
        mixer.step(torch.randn(2, 1, C), mixer.init_state(2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GLAConfig(num_heads=0), "num_heads must be 1 or more, got 0"),
        (GLAConfig(num_heads=3), "expand_k must give each of the 3 heads a whole number"),
        (GLAConfig(expand_v=0.3), "expand_v must give each of the 4 heads a whole number"),
        (GLAConfig(num_kv_heads=3), "num_kv_heads must divide num_heads = 4, got 3"),
        (GLAConfig(num_kv_heads=0), "num_kv_heads must divide num_heads = 4, got 0"),
        (GLAConfig(gate_rank=0), "gate_rank must be 1 or more, got 0"),
        (GLAConfig(damping=0.0), "damping must be positive, got 0"),
        (GLAConfig(feature_map="gelu"), "feature_map must be None or 'relu', got 'gelu'"),
    ],
)
def test_impossible_configurations_are_refused_when_they_are_built(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)


def test_the_mixer_compiles_without_a_graph_break():
    torch._dynamo.reset()
    mixer, x = GLAConfig(num_heads=2).build(C), torch.randn(1, 10, C)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    borders = torch.tensor([0, 3, 10])
    assert_close("training", compiled(x)[0], mixer(x)[0], rtol=1e-5)
    packed = mixer(x, cu_seqlens=borders)[0]
    assert_close("packed", compiled(x, cu_seqlens=borders)[0], packed, rtol=1e-5)
