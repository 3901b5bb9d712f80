"""RAT-Reversed: the two limits of appendix C.1, the weights and the costs."""

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.positions import apply_rope, rope_angles
from mezzo_core.testing import assert_close
from mezzo_rat import LinearRNNConfig, RATReversedConfig
from torch import nn

C = 16


def build(chunk_size, **changes):
    torch.manual_seed(0)
    mixer = RATReversedConfig(chunk_size, head_dim=4, gate_rank=3, span=4, **changes).build(C)
    for part in mixer.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.5)
    return mixer


@pytest.mark.parametrize("chunk_size", [11, 12, 64])
def test_one_chunk_is_softmax_attention(chunk_size):
    mixer, x = build(chunk_size, rope_base=300.0), torch.randn(2, 11, C)
    v, g, k, z, q = mixer.in_proj(x).split(mixer.widths, dim=-1)
    v, k, q = (y.unflatten(-1, (-1, 4)) for y in (v, k, q))
    angles = rope_angles(torch.arange(11), 4, 300.0)
    q, k = apply_rope(q, *angles).expand_as(k), apply_rope(k, *angles)
    a = F.scaled_dot_product_attention(*(y.transpose(1, 2) for y in (q, k, v)), is_causal=True)
    f = torch.sigmoid(g + mixer.gate_bias)
    y = torch.sigmoid(mixer.z_proj(z)) * (1 - f) * a.transpose(1, 2).flatten(2)
    assert_close("y", mixer(x)[0], mixer.out_proj(y).detach(), rtol=1e-5)


def test_chunks_of_one_token_are_the_linear_rnn():
    mixer, x = build(1), torch.randn(2, 11, C)
    rnn = LinearRNNConfig().build(C)
    v, g, _, z, _ = mixer.in_proj.weight.split(mixer.widths)
    with torch.no_grad():
        rnn.in_proj.weight.copy_(torch.cat([mixer.z_proj.weight @ z, v, g]))
        rnn.gate_bias.copy_(mixer.gate_bias)
        rnn.out_proj.weight.copy_(mixer.out_proj.weight)
    assert_close("y", mixer(x)[0], rnn(x)[0].detach(), rtol=1e-5)


def test_the_forget_gates_decide_what_passes_from_chunk_to_chunk():
    mixer, x = build(3), torch.randn(1, 6, C)
    with torch.no_grad():
        mixer.gate_bias.fill_(1e4)  # keep everything: h stays zero
        assert mixer(x)[0].abs().max() == 0
        mixer.gate_bias.fill_(-1e4)  # keep nothing: no chunk reaches the next
        other = x.clone()
        other[:, :3] = torch.randn(1, 3, C)
        assert torch.equal(mixer(x)[0][:, 3:], mixer(other)[0][:, 3:])


@pytest.mark.parametrize(
    "config", [RATReversedConfig(4, head_dim=64, span=16), LinearRNNConfig(span=16)], ids=str
)
def test_gates_start_with_memories_of_up_to_the_span(config):
    u = config.build(1024).gate_bias.detach().exp()
    assert 14.5 < u.max() <= 15 + 1e-4
    assert abs(u.mean() - 8) < 0.05 * 15


@torch.no_grad()
def test_what_passes_from_chunk_to_chunk_stays_in_float32():
    mixer = build(3).bfloat16()
    mixer.gate_bias.fill_(1e4)  # keep everything
    state = mixer.init_state(2)._replace(h=torch.randn(2, 4, 4))
    _, after = mixer(torch.randn(2, 4, C).bfloat16(), state)
    assert torch.equal(after.h, state.h)


def test_weights_are_those_of_attention_and_a_low_rank_gate():
    with torch.device("meta"):
        mixer = RATReversedConfig(64, head_dim=64, gate_rank=64).build(1024)
    weights = sum(p.numel() for p in mixer.parameters() if p.ndim == 2)
    assert weights == 4 * 1024**2 + 1024 * 64 + 2 * 64 * 1024


def test_flops_grow_with_the_chunk_and_not_with_the_sequence():
    mixer = build(4)
    weights = sum(p.numel() for p in mixer.parameters() if p.ndim == 2)
    assert mixer.flops_per_token(8) == 2 * weights + 4 * C * 2.5 + 4 * C
    assert mixer.flops_per_token(8) == mixer.flops_per_token(8000)
    assert mixer.flops_per_token(6) == 2 * weights + 4 * C * (4 * 2.5 + 3) / 6 + 4 * C
    assert mixer.flops_per_token(0) == 2 * weights + 4 * C


def test_an_odd_head_dim_is_refused():
    with pytest.raises(ValueError, match="head_dim must be even and divide"):
        RATReversedConfig(head_dim=5).build(C)
