"""The HGRN2 mixer: its definition, its lower bounds and its sizes."""

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.nn.init import init_weights
from mezzo_core.testing import assert_close
from mezzo_gsa.hgrn2 import HGRN2Config, lower_bounds
from mezzo_gsa.ops.gates import bounded_gate, log_gate

C = 16


@pytest.mark.parametrize("bound", [0.0, 0.25])
def test_it_is_the_definition(bound):
    torch.manual_seed(0)
    mixer = HGRN2Config(head_dim=4, lower_bound=bound).build(4).double()
    init_weights(mixer, std=0.5)
    x = torch.randn(1, 6, 4, dtype=torch.float64)
    q, logits, v = (x[0] @ w.T for w in mixer.in_proj.weight.split([4, 4, 4]))
    q, alpha = F.silu(q), bound + (1 - bound) * torch.sigmoid(logits)
    S, outs = torch.zeros(4, 4, dtype=torch.float64), []
    for t in range(6):
        S = alpha[t, :, None] * S + torch.outer(1 - alpha[t], v[t])
        outs.append(S.T @ q[t])
    o = torch.stack(outs)
    o = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    assert_close("y", mixer(x)[0][0], mixer.out_proj(o), rtol=1e-6)


@pytest.mark.parametrize("bound", [0.0, 0.25])
def test_gates_keep_their_digits_where_nothing_or_all_is_forgotten(bound):
    logits = torch.tensor([-200.0, -20.0, 0.0, 20.0, 80.0])
    k, g = bounded_gate(log_gate(logits, 1.0), bound)
    forgotten = (1 - bound) * torch.sigmoid(-logits.double())
    assert_close("1 - alpha", k, forgotten, rtol=1e-6)
    assert torch.allclose(-torch.expm1(g.double()), forgotten, rtol=1e-5, atol=1e-7)
    assert (g <= 0).all()


def test_bounds_rise_with_depth_from_zero():
    assert lower_bounds(4) == [0.0, 0.25, 0.5, 0.75]
    assert lower_bounds(1) == [0.0]
    # The paper's softmax over layers, of equal logits, summed over the layers below each.
    share = torch.zeros(5, dtype=torch.float64).softmax(0)
    assert lower_bounds(5) == pytest.approx((share.cumsum(0) - share[0]).tolist())
    with pytest.raises(ValueError, match="num_layers must be 1 or more, got 0"):
        lower_bounds(0)


def test_a_layer_of_the_paper_has_four_squares_and_128_d_numbers_of_state():
    with torch.device("meta"):
        mixer = HGRN2Config().build(2048)
    assert sum(p.numel() for p in mixer.parameters()) == 4 * 2048**2 + 2048  # norm: C
    assert mixer.state_bytes(1) == mixer.state_bytes(10**6) == 4 * 128 * 2048
    assert mixer.flops_per_token(7) == 8 * 2048**2 + 5 * 128 * 2048


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (HGRN2Config(), "head_dim must divide d_model = 16, got 128"),
        (HGRN2Config(head_dim=4, lower_bound=1.0), r"lower_bound must be in \[0, 1\), got 1.0"),
        (HGRN2Config(head_dim=4, lower_bound=-0.1), r"lower_bound must be in \[0, 1\), got -0.1"),
    ],
)
def test_impossible_configurations_are_refused_when_they_are_built(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)


@pytest.mark.parametrize(
    ("bounds", "error", "message"),
    [
        ([0.5], TypeError, "log_bounds must be a tensor, got list"),
        (torch.zeros(2, C, dtype=torch.int64), TypeError, "log_bounds must be floating-point"),
        (torch.zeros(C), ValueError, r"log_bounds must be \(2, 16\), got \(16,\)"),
        (torch.zeros(2, 8), ValueError, r"log_bounds must be \(2, 16\), got \(2, 8\)"),
    ],
)
def test_bounds_that_fit_no_channels_are_named(bounds, error, message):
    mixer = HGRN2Config(head_dim=4).build(C)
    with pytest.raises(error, match=message):
        mixer(torch.zeros(1, 3, C), log_bounds=bounds)
    with torch.no_grad(), pytest.raises(error, match=message):
        mixer.step(torch.zeros(1, 1, C), mixer.init_state(1), bounds)
