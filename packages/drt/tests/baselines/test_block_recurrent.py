"""The Block-Recurrent Transformer's layer is its definition, and keeps the contract."""

import math
from dataclasses import replace

import pytest
import torch
from mezzo_core.nn import MLPConfig
from mezzo_core.nn.lm import LMConfig
from mezzo_core.positions import alibi_slopes
from mezzo_core.testing.arguments import check_fields, check_module_arguments
from mezzo_core.testing.laws import LAWS
from mezzo_core.testing.numerics import assert_close
from mezzo_drt.baselines import BlockRecurrentConfig
from torch import nn

C, D = 12, 6
CONFIGS = {
    "fixed": BlockRecurrentConfig(head_dim=D, num_states=3, block_size=4, window_size=6),
    "lstm": BlockRecurrentConfig(
        head_dim=D, num_states=2, block_size=5, window_size=5, gate="lstm", alibi=None
    ),
    "block of one": BlockRecurrentConfig(head_dim=D, num_states=2, block_size=1, window_size=3),
}


def built(config, dtype=torch.float32):
    torch.manual_seed(0)
    mixer = config.build(C)
    for module in mixer.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.3)
    nn.init.normal_(mixer.state_ids)
    if mixer.forget is not None:
        nn.init.normal_(mixer.forget)
    return mixer.to(dtype)


@pytest.fixture(params=CONFIGS)
def mixer(request):
    return built(CONFIGS[request.param])


def attend(q, k, v, bias=0.0):
    """Softmax attention of one head: q (X, D), k and v (S, D)."""
    return (q @ k.T / math.sqrt(D) + bias).softmax(-1) @ v


def by_hand(m, x):
    """The definition, for one row (T, C): a block after another, a head after another."""
    c = m.config
    heads = range(C // D)
    cut = [slice(h * D, h * D + D) for h in heads]
    slopes = (
        torch.zeros(len(heads))
        if c.alibi is None
        else alibi_slopes(len(heads), c.alibi, dtype=torch.float64)
    )
    q, q_s, k, v = m.token_qkv(x).chunk(4, -1)
    s, outputs = m.first_states, []
    for begin in range(0, len(x), c.block_size):
        end = min(begin + c.block_size, len(x))
        sq, sq_e, sk, sv = m.state_qkv(m.state_norm(s) + m.state_ids).chunk(4, -1)
        for t in range(begin, end):
            low = max(0, t + 1 - c.window_size)
            past = torch.arange(low, t + 1)
            own = [
                attend(q[t, i], k[past][:, i], v[past][:, i], slopes[h] * (past - t))
                for h, i in enumerate(cut)
            ]
            read = [attend(q_s[t, i], sk[:, i], sv[:, i]) for i in cut]
            outputs.append(m.token_out(torch.cat([*own, *read])))
        if end - begin < c.block_size:
            break
        block = slice(begin, end)
        h = [attend(sq[:, i], sk[:, i], sv[:, i]) for i in cut]
        h += [attend(sq_e[:, i], k[block, i], v[block, i]) for i in cut]
        h = m.gate(m.state_out(torch.cat(h, -1)))
        if c.gate == "fixed":
            g = torch.sigmoid(m.forget)
            s = g * s + (1 - g) * h
        else:
            z, i, f = h.chunk(3, -1)
            s = torch.sigmoid(f + 1) * s + torch.sigmoid(i - 1) * torch.tanh(z)
    return torch.stack(outputs)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_layer_is_its_definition(name):
    mixer = built(CONFIGS[name], torch.float64)
    x = torch.randn(2, 19, C, dtype=torch.float64)
    with torch.no_grad():
        expected = torch.stack([by_hand(mixer, row) for row in x])
        torch.testing.assert_close(mixer(x)[0], expected, rtol=1e-12, atol=1e-12)


# The first states are weights, so FSDP shards a part of the state too.
@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(mixer, law):
    LAWS[law](mixer)


def test_all_weights_learn_from_segments_as_from_the_whole(mixer):
    x, dy = torch.randn(2, 2, 13, C)
    whole, state = mixer(x)[0], mixer.init_state(2)
    parts = []
    for part in x.split([4, 0, 9], 1):
        y, state = mixer(part, state)
        parts.append(y)
    weights = dict(mixer.named_parameters())
    found, wanted = (
        torch.autograd.grad(y, list(weights.values()), dy) for y in (torch.cat(parts, 1), whole)
    )
    for name, got, right in zip(weights, found, wanted, strict=True):
        assert_close(name, got, right, rtol=1e-4)


def test_arguments_replaced_are_refused_by_name(mixer):
    check_module_arguments(mixer)


def test_fields_replaced_are_named_or_right():
    x = torch.randn(1, 9, 16)
    config = replace(CONFIGS["fixed"], head_dim=4)
    check_fields(config, lambda config: config.build(16)(x)[0])


def test_states_carry_what_the_window_has_lost(mixer):
    """The first token is far behind the window of the last, and still matters."""
    x = torch.randn(1, 40, C, generator=torch.Generator().manual_seed(0))
    other = x.clone()
    other[:, 0] += 1
    with torch.no_grad():
        moved = (mixer(x)[0] - mixer(other)[0]).abs().amax(-1)[0]
    assert moved[-1] > 0
    window = mixer.config.window_size
    assert moved[window:].max() < moved[0]


def test_every_weight_learns_in_a_model(mixer):
    model = LMConfig(
        vocab_size=11, d_model=C, mixers=(mixer.config,), mlp=MLPConfig(hidden=16), init_std=0.2
    ).build()
    tokens = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(0))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_states_are_float32_though_weights_are_bf16(gate):
    """A slow gate adds less to a state than bf16 can tell."""
    mixer = built(replace(CONFIGS["fixed"], gate=gate))
    if mixer.forget is not None:
        nn.init.constant_(mixer.forget, 6.0)
    mixer.bfloat16()
    x = torch.randn(2, 500, C, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.no_grad():
        _, state = mixer(x, mixer.init_state(2))
        assert state.s.dtype == mixer.init_state(2).s.dtype == torch.float32
        assert mixer.state_bytes(0) == sum(part[:1].nbytes for part in state[:3])
        mixer.float()
        _, expected = mixer(x.float(), mixer.init_state(2))
    assert_close("states", state.s, expected.s, rtol=1e-2)


def test_a_window_shorter_than_a_block_is_refused():
    with pytest.raises(ValueError, match="window_size must be at least the block_size, 8, got 7"):
        BlockRecurrentConfig(block_size=8, window_size=7)
