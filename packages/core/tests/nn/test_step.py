"""Decoding in place by a whole model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.testing import assert_close
from torch.utils._pytree import tree_leaves


def tokens_of(*shape):
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["running mean", "attention"])
def test_steps_in_place_equal_the_whole(config, kind):
    if kind == "attention":
        config = replace(config, mixers=(AttentionConfig(head_dim=8, window_size=4),) * 2)
    model, tokens = config.build(), tokens_of(2, 12)
    with torch.no_grad():
        logits, given = model(tokens[:, :5], model.init_state(2))
        state = model.reserve(given, 7)
        steps = [model.step(tokens[:, t : t + 1], state) for t in range(5, 12)]
        assert_close("steps", torch.cat([logits, *steps], 1), model(tokens).logits, rtol=1e-5)
        again = model(tokens[:, 5:], given).logits
    assert_close("after the state before", again, torch.cat(steps, 1), rtol=1e-5)


def test_a_bad_step_is_refused(model):
    tokens, state = tokens_of(2, 1), model.reserve(model.init_state(2), 3)
    with pytest.raises(RuntimeError, match=r"torch\.inference_mode"):
        model.step(tokens, state)
    with torch.no_grad():
        with pytest.raises(ValueError, match=r"tokens must be \(B, 1\), got \(2, 3\)"):
            model.step(tokens_of(2, 3), state)
        with pytest.raises(ValueError, match="tokens must be int64"):
            model.step(tokens.int(), state)
        with pytest.raises(ValueError, match="state must hold 2 blocks' states, got 1"):
            model.step(tokens, state[:1])
    with pytest.raises(ValueError, match="state must hold 2 blocks' states, got NoneType"):
        model.before_step(None)
    with pytest.raises(ValueError, match="num_tokens must be 0 or more, got -1"):
        model.reserve(state, -1)
    with pytest.raises(ValueError, match="batch must be 0 or more, got -1"):
        model.init_state(-1)


@torch.no_grad()
def test_a_step_that_one_layer_refuses_moves_none(config):
    """A ring has room for ever, and a layer without a window has not."""
    layers = (AttentionConfig(head_dim=8, window_size=2), AttentionConfig(head_dim=8))
    model, tokens = replace(config, mixers=layers).build(), tokens_of(2, 1)
    state = model.reserve(model.init_state(2), 2)
    for _ in range(2):
        model.step(tokens, state)
    before = [part.clone() for part in tree_leaves(state)]
    for bad, words in ((state, "room for 2 tokens"), ((state[0], None), "KVCache")):
        with pytest.raises((TypeError, ValueError), match=words):
            model.step(tokens, bad)
        assert all(map(torch.equal, before, tree_leaves(state)))


@pytest.mark.parametrize("count", [1.5, "3", None, True])
def test_numbers_that_are_no_ints_are_refused_by_name(model, count):
    with pytest.raises(TypeError, match="num_tokens must be an int, got "):
        model.reserve(model.init_state(1), count)
    with pytest.raises(TypeError, match="batch must be an int, got "):
        model.init_state(count)


def test_numbers_may_be_numpys(model):
    state = model.reserve(model.init_state(np.int64(2)), np.int64(3))
    with torch.no_grad():
        assert model.step(torch.zeros(2, 1, dtype=torch.int64), state).shape[0] == 2
