"""The RetNet mixer: its definition, its decays, its sizes and costs."""

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.nn.init import init_weights
from mezzo_core.positions import apply_rope, rope_angles
from mezzo_core.testing import assert_close
from mezzo_gsa.retnet import RetNetConfig, log_decay
from torch._subclasses.fake_tensor import FakeTensorMode

C = 16


def test_it_is_the_definition_as_a_decayed_product_of_rotated_queries_and_keys():
    torch.manual_seed(0)
    mixer = RetNetConfig(num_heads=2, num_kv_heads=1).build(8).double()
    init_weights(mixer, std=0.5)
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    angles = rope_angles(torch.arange(7), 4)
    # By separate products, with the weights in the order of the docstring.
    q, k, v, z = (x @ w.T for w in mixer.in_proj.weight.split([8, 4, 8, 16]))
    q = apply_rope(q.unflatten(-1, (2, 4)), *angles)
    k = apply_rope(k.unflatten(-1, (1, 4)), *angles)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    gamma = torch.tensor([1 - 2**-5, 1 - 2**-6], dtype=torch.float64)
    decay = (gamma[:, None, None] ** distance).tril()
    scores = torch.einsum("thk,sk->hts", q[0], k[0, :, 0]) / 4**0.5 * decay
    o = torch.einsum("hts,sv->thv", scores, v[0])
    o = o / (o.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    expected = mixer.out_proj(o.flatten(1) * F.silu(z[0]))
    assert_close("y", mixer(x)[0][0], expected, rtol=1e-6)


def test_supra_is_retention_of_mapped_queries_and_keys_with_group_norm():
    torch.manual_seed(0)
    form = {"expand_v": 1.0, "feature_map": "relu", "output_gate": False}
    mixer = RetNetConfig(2, qk_map=True, norm="group", **form).build(8).double()
    init_weights(mixer, std=0.5)
    assert torch.equal(mixer.qk_map.weight, torch.eye(4, dtype=torch.float64))
    for weight in (*mixer.qk_map.parameters(), *mixer.norm.parameters()):
        torch.nn.init.normal_(weight)
    x = torch.randn(1, 7, 8, dtype=torch.float64)
    angles = rope_angles(torch.arange(7), 4)
    q, k, v = (x[0] @ w.T for w in mixer.in_proj.weight.split(8))
    weight, bias = mixer.qk_map.parameters()
    q, k = (F.relu(part.unflatten(-1, (2, 4)) @ weight.T + bias) for part in (q, k))
    q, k = (apply_rope(part[None], *angles)[0] for part in (q, k))
    gamma = torch.tensor([1 - 2**-5, 1 - 2**-6], dtype=torch.float64)
    distance = (torch.arange(7)[:, None] - torch.arange(7)).clamp(min=0)
    scores = torch.einsum("thk,shk->hts", q, k) / 2 * (gamma[:, None, None] ** distance).tril()
    o = torch.einsum("hts,shv->thv", scores, v.unflatten(-1, (2, 4)))
    o = F.layer_norm(o, (4,), eps=1e-6).flatten(1) * mixer.norm.weight + mixer.norm.bias
    assert_close("y", mixer(x)[0][0], mixer.out_proj(o), rtol=1e-6)


def test_many_heads_decay_by_less_than_float32_can_tell_from_one():
    found = log_decay(32, torch.device("cpu"), torch.float32).double()
    expected = torch.log1p(-(2.0 ** (-5 - torch.arange(32, dtype=torch.float64))))
    assert_close("log decay", found, expected, rtol=1e-6)
    assert (found < 0).all()


def test_places_go_on_from_the_state():
    torch.manual_seed(0)
    mixer = RetNetConfig(num_heads=2).build(C)
    _, state = mixer(torch.randn(2, 5, C), mixer.init_state(2), lengths=torch.tensor([5, 2]))
    assert state.lengths.tolist() == [5, 2]
    x = torch.randn(2, 3, C)
    fresh = state._replace(lengths=torch.zeros_like(state.lengths))
    assert not torch.allclose(mixer(x, state)[0], mixer(x, fresh)[0])


@torch.no_grad()
def test_places_beyond_16_million_tokens_are_as_exact_as_the_first():
    torch.manual_seed(0)
    mixer = RetNetConfig(num_heads=2).build(C)
    x, state = torch.randn(1, 9, C), mixer.init_state(1)
    near, far = mixer(x)[0], state._replace(lengths=torch.tensor([2**24 + 1]))  # no float32
    assert_close("forward", mixer(x, far)[0], near, rtol=1e-5)
    far = mixer.reserve(far, 9)
    steps = [mixer.step(token, far) for token in x.split(1, dim=1)]
    assert_close("step", torch.cat(steps, 1), near, rtol=1e-5)


@torch.no_grad()
def test_a_step_traced_with_fake_tensors_leaves_later_steps_real():
    mixer = RetNetConfig(num_heads=7).build(14)  # no other test has made a table for 7 heads
    with FakeTensorMode(allow_non_fake_inputs=True):  # as in torch.export
        mixer.step(torch.empty(1, 1, 14), mixer.init_state(1))
    x = torch.randn(1, 1, 14)
    assert_close("y", mixer.step(x, mixer.init_state(1)), mixer(x)[0], rtol=1e-5)


def test_a_layer_of_the_paper_has_eight_squares_and_512_d_numbers_of_state():
    with torch.device("meta"):
        mixer = RetNetConfig(num_heads=8).build(2048)  # the paper's key heads are 256 wide
    assert sum(p.numel() for p in mixer.parameters()) == 8 * 2048**2 + 512  # norm: V
    assert mixer.heads == (8, 8, 256, 512)
    assert mixer.state_bytes(1) == mixer.state_bytes(10**6) == 4 * 512 * 2048 + 8


def test_flops_are_the_weights_twice_and_the_state_five_times():
    with torch.device("meta"):
        mixer = RetNetConfig(num_heads=8).build(2048)
    assert mixer.flops_per_token(7) == 2 * 8 * 2048**2 + 5 * 512 * 2048 + 2 * 2048
    plain, mapped = (RetNetConfig(4, 2, qk_map=on).build(64) for on in (False, True))
    assert mapped.flops_per_token(7) - plain.flops_per_token(7) == 2 * (4 + 2) * 16**2


def test_t2r_adds_no_weights_but_the_norm():
    config = RetNetConfig(32, 8, expand_v=1.0, feature_map="relu", output_gate=False)
    with torch.device("meta"):
        mixer = config.build(4096)
    projections = 2 * 4096**2 + 2 * 4096 * 1024  # q and o; k and v of 8 heads
    assert sum(p.numel() for p in mixer.parameters()) == projections + 128


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            RetNetConfig(num_heads=3),
            "expand_k must give each head, of num_heads = 3, a whole number",
        ),
        (RetNetConfig(num_heads=16), "keys of an even width, got 1 channels a head"),
        (RetNetConfig(num_kv_heads=3), "num_kv_heads must divide num_heads = 4, got 3"),
        (RetNetConfig(feature_map="exp"), r"feature_map must be one of \('relu',\), got 'exp'"),
        (RetNetConfig(norm="layer"), "norm must be one of .*, got 'layer'"),
    ],
)
def test_impossible_configurations_are_refused_when_they_are_built(config, message):
    with pytest.raises(ValueError, match=message):
        config.build(C)


def test_in_float64_only_distances_matter_to_the_last_digits():
    torch.manual_seed(0)
    mixer, x = RetNetConfig(2).build(16).double(), torch.randn(1, 9, 16, dtype=torch.float64)
    state = mixer.init_state(1)
    with torch.no_grad():
        first, _ = mixer(x, state)
        far, _ = mixer(x, state._replace(lengths=state.lengths + 100_003))
        step = mixer.step(x[:, :1], state._replace(lengths=state.lengths + 100_003))
    torch.testing.assert_close(far, first, rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(step, first[:, :1], rtol=1e-9, atol=1e-10)
