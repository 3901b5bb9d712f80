"""A Transformer's weights in GSA, GLA and RetNet: each where the target's equations use it."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.block import MixerBlockConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.nn.mlp import MLPConfig
from mezzo_core.nn.stack import BlocksConfig
from mezzo_core.positions import RopeScaling
from mezzo_gsa.convert import TARGETS, convert, convert_config, load_llama
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.hgrn2_stack import HGRN2StackConfig

B, T, C, HQ, H, D = 2, 9, 32, 4, 2, 8
SCALED = {"num_heads": HQ, "rope_scaling": RopeScaling(4.0)}
NEW = {"gsa": ("norm.weight",), "gla": ("g_proj.", "norm.weight"), "retnet": ("norm.weight",)}


@pytest.fixture
def transformer(request):
    """A Transformer of two layers with weights that no initialization would give."""
    d_model, more = getattr(request, "param", (C, {}))
    config = LMConfig(
        vocab_size=61,
        d_model=d_model,
        mixers=(AttentionConfig(D, num_kv_heads=H, rope_base=300.0, **more),) * 2,
        mlp=MLPConfig("swiglu", hidden=48),
        norm_eps=1e-5,
        tie_embeddings=False,
    )
    torch.manual_seed(5)
    model = config.build()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(0.3 * torch.randn_like(weight) + (weight.ndim == 1))
    return config, model.state_dict()


def mixer_of(config, weights, layer=0):
    model = config.build().double()
    model.load_state_dict({name: weight.double() for name, weight in weights.items()})
    return model.stack.blocks[layer].mixer


def heads(x, weight, num_heads):
    """(B, T, C) by a matrix of the Transformer, cut into heads, each of which HQ / H queries read.

    Returns (B, T, HQ, D): head h of the queries reads head h // (HQ / H).
    """
    parts = (x @ weight.double().T).split(D, -1)
    return torch.stack([parts[h * num_heads // HQ] for h in range(HQ)], 2)


def rotated(x, base, slower):
    """Turn the pair (i, i + D/2) at place t by t / slower base^(-2i/D)."""
    angle = torch.arange(T)[:, None] / slower * base ** (-torch.arange(0, D, 2) / D)
    left, right = x.split(D // 2, -1)
    cos, sin = angle.double().cos()[:, None], angle.double().sin()[:, None]
    return torch.cat([left * cos - right * sin, left * sin + right * cos], -1)


def normed(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def gsa_by_hand(x, old, mixer):
    """Equations 6 to 9, a token at a time, with Wα from the mixer: it is the only new matrix.

    Where slots start apart, Wα comes with a bias.
    """
    wa, bias = mixer.in_proj.weight[HQ * D + 2 * H * D :], mixer.in_proj.bias
    q, k, v = (F.silu(heads(x, old[f"w{part}"], n)) for part, n in (("q", HQ), ("k", H), ("v", H)))
    logits = x @ wa.T if bias is None else x @ wa.T + bias[HQ * D + 2 * H * D :]
    alpha = torch.sigmoid(logits) ** (1 / 8)
    alpha = alpha.unflatten(-1, (H, 64)).repeat_interleave(HQ // H, 2)
    keys, values = torch.zeros(2, B, HQ, 64, D, dtype=torch.float64)
    out = []
    for t in range(T):
        a = alpha[:, t, :, :, None]
        keys = a * keys + (1 - a) * k[:, t, :, None]
        values = a * values + (1 - a) * v[:, t, :, None]
        p = torch.einsum("bhmd,bhd->bhm", keys, q[:, t]).softmax(-1)
        out.append(torch.einsum("bhm,bhmd->bhd", p, values).flatten(1))
    return normed(F.silu(torch.stack(out, 1))) @ old["wo"].T


def linear_by_hand(q, k, v, decay, old, center=False):
    """S = Diag(α) S + k v^T, o = S^T q; each head's output normalized; no gate (section 4.2)."""
    state = torch.zeros(B, HQ, D, D, dtype=torch.float64)
    out = []
    for t in range(T):
        state = decay[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None]
        y = torch.einsum("bhkv,bhk->bhv", state, q[:, t]) * D**-0.5
        out.append(normed(y - y.mean(-1, keepdim=True) if center else y).flatten(1))
    return torch.stack(out, 1) @ old["wo"].T


def gla_by_hand(x, old, mixer):
    q, k = (F.relu(heads(x, old[f"w{part}"], n)) for part, n in (("q", HQ), ("k", H)))
    w1 = mixer.in_proj.weight[HQ * D + 2 * H * D :]
    alpha = torch.sigmoid(mixer.g_proj(x @ w1.T)) ** (1 / 16)
    alpha = alpha.unflatten(-1, (H, D)).repeat_interleave(HQ // H, 2)
    return linear_by_hand(q, k, heads(x, old["wv"], H), alpha, old)


def retnet_by_hand(x, old, mixer):
    slower = 1 if x.shape[-1] == C else 4
    q, k = (
        rotated(F.relu(heads(x, old[f"w{part}"], n)), 300.0, slower)
        for part, n in (("q", HQ), ("k", H))
    )
    gamma = 1 - 2.0 ** (-5 - torch.arange(HQ).double())
    decay = gamma[:, None].expand(B, T, HQ, 1)
    return linear_by_hand(q, k, heads(x, old["wv"], H), decay, old, center=mixer.qk_map is not None)


BY_HAND = {
    "gsa": gsa_by_hand,
    "gsa_spread": gsa_by_hand,
    "gla": gla_by_hand,
    "retnet": retnet_by_hand,
    "supra": retnet_by_hand,  # its map of queries and keys starts as the identity
}


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    "transformer", [(C, {}), (49, SCALED), (24, SCALED)], indirect=True, ids=["full", "49", "24"]
)
@torch.no_grad()
def test_a_converted_layer_computes_its_equations_with_the_transformers_weights(
    transformer, target, layer
):
    config, weights = transformer
    mixer = mixer_of(*convert(config, weights, TARGETS[target]), layer)
    prefix = f"stack.blocks.{layer}.mixer."
    mine = {n: w.double() for n, w in weights.items() if n.startswith(prefix)}
    old = {name.removeprefix(prefix).split(".")[0]: weight for name, weight in mine.items()}
    draws = torch.Generator().manual_seed(0)
    x = torch.randn(B, T, config.d_model, dtype=torch.float64, generator=draws)
    expected = BY_HAND[target](x, old, mixer)
    # The rotation's angles are float32 in the mixer.
    torch.testing.assert_close(mixer(x)[0], expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("target", TARGETS)
def test_all_but_the_mixers_is_the_transformers_own(transformer, target):
    config, weights = transformer
    new_config, new = convert(config, weights, TARGETS[target])
    assert set(new) == set(new_config.build().state_dict())
    outside = [name for name in weights if ".mixer." not in name]
    assert len(outside) == 3 + 2 * 5
    assert all(new[name] is weights[name] for name in outside)
    assert replace(new_config, mixers=config.mixers) == config


@pytest.mark.parametrize("target", TARGETS)
def test_a_seed_draws_what_is_new_and_nothing_else(transformer, target):
    config, weights = transformer
    before = torch.get_rng_state()
    (_, first), (_, again), (_, other) = (
        convert(config, weights, TARGETS[target], seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(weight, again[name]) for name, weight in first.items())
    changed = {name for name, weight in first.items() if not torch.equal(weight, other[name])}
    drawn = {
        "gsa": ["in_proj.weight"],
        "gsa_spread": ["in_proj.weight"],
        "gla": ["in_proj.weight", "g_proj.weight"],
        "retnet": [],
        "supra": [],
    }
    assert changed == {f"stack.blocks.{i}.mixer.{name}" for i in range(2) for name in drawn[target]}


def test_new_matrices_are_drawn_as_a_models_own_are(transformer):
    config, weights = transformer
    _, new = convert(replace(config, init_std=0.05), weights, TARGETS["gsa"])
    gates = torch.cat([new[f"stack.blocks.{i}.mixer.in_proj.weight"][-H * 64 :] for i in range(2)])
    assert gates.shape == (2 * H * 64, C)
    assert gates.std() == pytest.approx(0.05, rel=0.05)
    assert not torch.equal(*gates.chunk(2))
    _, new = convert(config, weights, TARGETS["gla"])
    low = new["stack.blocks.0.mixer.in_proj.weight"][-16:]
    assert low.std() == pytest.approx(0.02, rel=0.2)
    assert (new["stack.blocks.0.mixer.g_proj.bias"] == 0).all()
    assert (new["stack.blocks.0.mixer.norm.weight"] == 1).all()


@pytest.mark.parametrize("target", TARGETS)
def test_weights_keep_their_dtype(transformer, target):
    config, weights = transformer
    weights = {name: weight.bfloat16() for name, weight in weights.items()}
    _, new = convert(config, weights, TARGETS[target])
    assert {weight.dtype for weight in new.values()} == {torch.bfloat16}


@pytest.mark.parametrize("target", TARGETS)
def test_a_llama_becomes_a_model_that_reads_and_learns(llama, checkpoint, target):
    folder, _ = checkpoint(llama())
    config, weights = convert(*load_llama(folder), TARGETS[target])
    model = config.build()
    model.load_state_dict(weights)
    tokens = torch.arange(24).view(2, 12)
    model.loss(tokens, tokens.roll(-1, 1)).backward()
    grads = {name: weight.grad for name, weight in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    # All weights train, the copied and the new ones.
    assert all(grad.abs().max() > 0 for grad in grads.values())


def test_a_target_of_ones_own_is_taken(transformer):
    config, weights = transformer

    def make(attention, model):
        return GSAConfig(HQ, attention.num_kv_heads, num_slots=16, feature_map="none")

    new_config, new = convert(config, weights, make)
    assert new_config.mixers == (GSAConfig(4, 2, num_slots=16, feature_map="none"),) * 2
    assert new["stack.blocks.0.mixer.in_proj.weight"].shape == (HQ * D + 2 * H * D + H * 16, C)


def test_widths_that_do_not_fit_are_refused_in_one_line(transformer):
    config, weights = transformer

    def narrow(attention, model):
        return GLAConfig(HQ, attention.num_kv_heads, expand_k=0.5)

    with pytest.raises(
        UserError,
        match=r"GLAConfig cannot be made of this attention: it has no Wq of shape \(32, 32\)",
    ):
        convert(config, weights, narrow)

    def fewer_groups(attention, model):
        return GSAConfig(HQ, 1)

    with pytest.raises(
        UserError,
        match=r"GSAConfig cannot be made of this attention: it has no Wk of shape \(16, 32\)",
    ):
        convert(config, weights, fewer_groups)


def test_layers_that_have_no_keys_are_refused_in_one_line(transformer):
    with pytest.raises(
        UserError, match="HGRN2Config cannot be made of attention: its mixer has no"
    ):
        convert(*transformer, lambda attention, model: HGRN2Config(D))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (
            {"stack.blocks.0.mixer.wq.weight": (24, C), "stack.blocks.0.mixer.wk.weight": (24, C)},
            "wk.weight",
        ),
        (
            {"stack.blocks.1.mixer.wv.weight": None},
            "weights: missing weights stack.blocks.1.mixer.wv",
        ),
        (
            {"stack.blocks.1.mixer.wv.bias": (16,)},
            "unexpected weights stack.blocks.1.mixer.wv.bias",
        ),
    ],
)
def test_weights_of_another_transformer_are_refused_in_one_line(transformer, change, named):
    config, weights = transformer
    weights = {**weights, **{n: s and torch.zeros(s) for n, s in change.items()}}
    weights = {name: weight for name, weight in weights.items() if weight is not None}
    with pytest.raises(UserError, match=named):
        convert(config, weights, TARGETS["gsa"])


def test_other_mixers_and_attention_without_rope_are_refused(transformer):
    config, _ = transformer
    hybrid = replace(config, mixers=(config.mixers[0], GSAConfig()))
    with pytest.raises(UserError, match="only softmax attention is converted, layer 1 has GSA"):
        convert_config(hybrid, TARGETS["gsa"])
    plain = replace(config, mixers=(AttentionConfig(D, rope_base=None),))
    with pytest.raises(UserError, match="no RoPE"):
        convert_config(plain, TARGETS["retnet"])
    convert_config(plain, TARGETS["gsa"])
    for more in ({"qk_norm": "rms"}, {"qkv_bias": True}):
        other = replace(config, mixers=(config.mixers[0], replace(config.mixers[1], **more)))
        with pytest.raises(UserError, match="layer 1 has them"):
            convert_config(other, TARGETS["gsa"])


def test_a_model_whose_layers_are_a_stack_is_refused(transformer):
    config, _ = transformer
    blocks = BlocksConfig((MixerBlockConfig(config.mixers[0]),))
    for stack in (HGRN2StackConfig(2, HGRN2Config(D)), blocks):
        model = LMConfig(vocab_size=61, d_model=C, stack=stack)
        with pytest.raises(UserError, match=f"a stack is not, got {type(stack).__name__}"):
            convert(model, model.build().state_dict(), TARGETS["gsa"])


def test_groups_of_keys_are_those_of_the_transformer(transformer):
    config, _ = transformer
    whole = AttentionConfig(D)
    grouped = replace(config, mixers=(whole, replace(whole, num_kv_heads=1)))
    for make in TARGETS.values():
        mixers = convert_config(grouped, make).mixers
        assert [(mixer.num_heads, mixer.num_kv_heads) for mixer in mixers] == [(4, None), (4, 1)]
