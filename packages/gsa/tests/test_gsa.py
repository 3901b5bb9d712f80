"""The GSA mixer: the paper's equations around the op, sizes and costs."""

import pytest
import torch
from mezzo_core.nn import init_weights
from mezzo_core.testing import assert_close
from mezzo_gsa import gsa
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.ops.gsa import recurrent_gsa
from torch import nn
from torch.nn import functional as F

C = 16


def build(config):
    torch.manual_seed(0)
    mixer = config.build(C)
    init_weights(mixer, std=0.5)
    return mixer


@pytest.mark.parametrize("gate", ["token", "constant"])
@pytest.mark.parametrize("keep_states", [False, True])
def test_states_are_kept_if_that_is_told(monkeypatch, gate, keep_states):
    """It changes no number: the op is asked for it."""
    name = "chunk_gsa_projected" if gate == "token" else "chunk_gsa"
    told, op = [], getattr(gsa, name)
    monkeypatch.setattr(gsa, name, lambda *x, **form: (told.append(form), op(*x, **form))[1])
    build(GSAConfig(2, num_slots=4, gate=gate, keep_states=keep_states))(torch.randn(1, 3, C))
    assert told[0]["keep_states"] == keep_states


@pytest.mark.parametrize(
    "config",
    [
        GSAConfig(2, num_slots=4),
        GSAConfig(4, num_kv_heads=2, num_slots=5),
        GSAConfig(2, num_slots=4, gate="constant"),
        GSAConfig(3, num_slots=4, head_dim=4),
        GSAConfig(2, num_slots=4, gate_spans=(2.0, 64.0)),
        GSAConfig(
            2, num_slots=3, between="relu", feature_map="none", output_norm=False, damping=1.0
        ),
        GSAConfig(1, num_slots=6, between="swish", keep_states=True, scale=None),
    ],
    ids=str,
)
def test_the_norm_is_the_same_before_the_projection_and_in_it(config):
    mixer = build(config)
    x, states = torch.randn(9, 1, C), [mixer.init_state(rows) for rows in (9, 3, 3)]
    with torch.no_grad():
        many = mixer.step(x, states[0])  # more rows than the projection's kernel takes
        few = mixer.step(x[:3], states[1])
        mixer.out_proj.register_forward_hook(lambda *call: 2 * call[-1])
        hooked = mixer.step(x[:3], states[2])
    assert_close("3 of 9 rows", few, many[:3], rtol=1e-6)
    assert_close("a layer with a hook", hooked, 2 * few, rtol=1e-6)


def test_the_state_has_two_numbers_a_slot_and_channel():
    with torch.device("meta"):
        mixer = GSAConfig().build(2048)
    assert mixer.state_bytes(1) == mixer.state_bytes(10_000) == 2 * 64 * 2048 * 4
    grouped = GSAConfig(num_kv_heads=1).build(64)
    assert grouped.state_bytes(1) == 2 * 64 * 16 * 4


@pytest.mark.parametrize(("scale", "factor"), [(1.0, 1.0), (None, 8**-0.5), (-3, -3.0)])
def test_it_is_equations_8_and_9_around_the_recurrence(scale, factor):
    H, M, D = 2, 4, 8
    mixer = build(GSAConfig(H, num_slots=M, scale=scale)).double()
    nn.init.uniform_(mixer.norm.weight, 0.5, 2.0)
    x = torch.randn(3, 9, C, dtype=torch.float64)
    wq, wk, wv, wa = mixer.in_proj.weight.split([C, C, C, H * M])
    q, k, v = (F.silu(x @ w.T).view(3, 9, H, D) for w in (wq, wk, wv))
    g = (x @ wa.T).sigmoid().pow(1 / 8).log().view(3, 9, H, M)
    o = F.silu(recurrent_gsa(q, k, v, g, scale=factor).out.reshape(3, 9, C))
    normed = o / (o.square().mean(-1, keepdim=True) + 1e-5).sqrt() * mixer.norm.weight
    y = normed @ mixer.out_proj.weight.T
    assert_close("y", mixer(x)[0], y, rtol=1e-10)
    state = mixer.init_state(3)
    with torch.no_grad():
        steps = [mixer.step(x[:, t : t + 1], state) for t in range(9)]
    assert_close("y, step by step", torch.cat(steps, 1), y, rtol=1e-10)


def test_query_heads_share_their_neighbours_keys():
    grouped = build(GSAConfig(4, num_kv_heads=2, num_slots=5))
    full = build(GSAConfig(4, num_slots=5))
    wq, *shared = grouped.in_proj.weight.split(list(grouped.widths))
    repeated = [w.view(2, -1, C).repeat_interleave(2, dim=0).flatten(0, 1) for w in shared]
    full.load_state_dict({**grouped.state_dict(), "in_proj.weight": torch.cat([wq, *repeated])})
    x = torch.randn(2, 9, C)
    assert_close("y", grouped(x)[0], full(x)[0], rtol=1e-5)


def test_the_parameters_are_the_papers_four_and_an_eighth_squares():
    with torch.device("meta"):
        mixer = GSAConfig().build(2048)
        constant = GSAConfig(gate="constant").build(2048)
    count = sum(p.numel() for p in mixer.parameters())
    assert count == 4.125 * 2048**2 + 2048  # the norm's weight
    assert sum(p.numel() for p in constant.parameters()) == 4 * 2048**2 + 2048 + 4 * 64


def test_flops_are_those_of_the_projections_and_the_state():
    mixer = GSAConfig(4, num_kv_heads=2, num_slots=5).build(C)
    projections = 2 * C * (C + C + 2 * 8 + 2 * 5)  # q, o; k, v; gates
    assert mixer.flops_per_token(3) == projections + 3 * (2 * 5 * 8) + 4 * 5 * C
    wide = GSAConfig(4, num_kv_heads=2, num_slots=5, head_dim=6).build(C)
    projections = 2 * C * (24 + 24 + 2 * 12 + 2 * 5)
    assert wide.flops_per_token(3) == projections + 3 * (2 * 5 * 12) + 4 * 5 * 24


def spans(mixer, x):
    """Return the memories (B, T, H, M) in tokens, after which 1/e is left (for long ones)."""
    *_, g = mixer._split(mixer.in_proj(x))
    return 1 / -torch.expm1(g.double())


@pytest.mark.parametrize("given", [None, (8.0, 512.0)])
def test_constant_gates_start_spread_and_ignore_the_tokens(given):
    mixer = GSAConfig(2, num_slots=11, gate="constant", gate_spans=given).build(C)
    short, long = given or (2.0, 2048.0)
    steps = torch.linspace(0, 1, 11, dtype=torch.float64)
    expected = (short * (long / short) ** steps).expand(2, 3, 2, 11)
    x = torch.randn(2, 3, C)
    torch.testing.assert_close(spans(mixer, x), expected, rtol=1e-4, atol=0.0)
    nn.init.zeros_(mixer.gate_logits)
    init_weights(mixer)
    torch.testing.assert_close(spans(mixer, x), expected, rtol=1e-4, atol=0.0)


def test_gates_that_look_at_the_token_may_start_spread_too():
    mixer = GSAConfig(4, num_kv_heads=2, num_slots=9, gate_spans=(2.0, 512.0)).build(C)
    expected = 2.0 ** torch.arange(1, 10, dtype=torch.float64).expand(1, 3, 2, 9)
    nn.init.ones_(mixer.in_proj.bias)
    init_weights(mixer)
    nothing, x = torch.zeros(1, 3, C), torch.randn(1, 3, C)
    torch.testing.assert_close(spans(mixer, nothing), expected, rtol=1e-4, atol=0.0)
    assert not torch.allclose(spans(mixer, x), expected, rtol=1e-4)
    q, k, v, _ = mixer._split(mixer.in_proj(nothing))
    assert not any(part.any() for part in (q, k, v))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (GSAConfig(3), "num_heads must divide d_model = 16, got 3"),
        (GSAConfig(4, num_kv_heads=3), "num_kv_heads must divide the 4 heads, got 3"),
        (GSAConfig(damping=0.0), "damping must be positive and finite, got 0.0"),
        (GSAConfig(scale=float("inf")), "scale must be finite, got inf"),
        (GSAConfig(scale=-1e31), r"scale must be within ±1e\+30, got -1e\+31"),
        (GSAConfig(gate_spans=(1.0, 9.0)), r"gate_spans must be above 1, .* got \(1.0, 9.0\)"),
        (GSAConfig(gate_spans=(2.0, 3.0, 4.0)), "gate_spans must have 2 items, got 3"),
        (GSAConfig(gate_spans=(9.0, 2.0)), "gate_spans must be .* the shorter first"),
        (GSAConfig(gate="token "), r"gate must be one of \('token', 'constant'\), got 'token '"),
        (GSAConfig(between="tanh"), r"between must be one of \('softmax', .*\), got 'tanh'"),
        (GSAConfig(feature_map="relu"), r"feature_map must be one of .*, got 'relu'"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_built_says_why(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)
