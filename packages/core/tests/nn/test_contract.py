"""The contract of mixers refuses what it cannot mean, in words of the caller."""

import numpy as np
import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig

C = 16


@pytest.fixture
def mixer():
    return AttentionConfig(head_dim=8).build(C)


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (None, TypeError, "x must be a tensor, got NoneType"),
        ([[[0.0] * C]], TypeError, "x must be a tensor, got list"),
        (np.zeros((1, 3, C), np.float32), TypeError, "x must be a tensor, got ndarray"),
        (torch.zeros(1, 3, C, dtype=torch.int64), TypeError, "got int64"),
        (torch.zeros(1, 3, C, dtype=torch.bool), TypeError, "got bool"),
        (torch.zeros(1, 3, C, dtype=torch.complex64), TypeError, "got complex64"),
        (torch.zeros(1, 3, C).to(torch.float8_e4m3fn), TypeError, "got float8_e4m3fn"),
        (torch.zeros(3, C), ValueError, r"x must be \(B, T, 16\), got \(3, 16\)"),
        (torch.zeros(1, 3, C + 1), ValueError, r"x must be \(B, T, 16\), got \(1, 3, 17\)"),
    ],
)
def test_forward_names_an_x_that_does_not_fit(mixer, x, error, words):
    with pytest.raises(error, match=words):
        mixer(x)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (
            lambda m: m.init_state(3),
            ValueError,
            r"state.k must be \(1, any, 2, 8\) .* \(3, 0, 2, 8",
        ),
        (lambda m: tuple(m.init_state(1)), TypeError, "state must be a KVCache .* got tuple"),
        (lambda m: list(m.init_state(1)), TypeError, "state must be a KVCache .* got list"),
        (lambda m: m.init_state(1).k, TypeError, "state must be a KVCache .* got Tensor"),
        (lambda m: m.init_state(1)._replace(v=None), TypeError, "state.v must be a tensor"),
        (lambda m: m.init_state(1)._replace(v=torch.ones(1, 0, 1, 8)), ValueError, "state.v must"),
        (lambda m: m.init_state(1)._replace(lengths=torch.tensor(0)), ValueError, "state.lengths"),
        (lambda m: m.init_state(1)._replace(lengths=torch.ones(1)), TypeError, "int64 tensor, got"),
        (lambda m: m.init_state(1)._replace(k=m.init_state(1).k.to("meta")), ValueError, "on meta"),
    ],
)
def test_a_state_of_another_kind_or_batch_is_refused(mixer, state, error, words):
    x = torch.zeros(1, 1, C)
    with torch.no_grad():
        for call in (mixer, mixer.step):
            with pytest.raises(error, match=words):
                call(x, state(mixer))


@pytest.mark.parametrize(
    ("borders", "error", "words"),
    [
        ([0, 3], TypeError, "cu_seqlens must be a tensor, got list"),
        (torch.tensor([0.0, 3.0]), TypeError, "cu_seqlens must be int32 or int64, got torch.float"),
        (torch.tensor([0, 4]), ValueError, "end at T = 3"),
        (torch.tensor([0, 2, 1, 3]), ValueError, "never decrease"),
        (torch.tensor([3]), ValueError, r"cu_seqlens must be \(S \+ 1,\)"),
    ],
)
def test_borders_are_checked(mixer, borders, error, words):
    with pytest.raises(error, match=words):
        mixer(torch.zeros(1, 3, C), cu_seqlens=borders)


@pytest.mark.parametrize(
    ("lengths", "error", "words"),
    [
        ([3], TypeError, "lengths must be a tensor, got list"),
        (torch.tensor([3.0]), TypeError, "lengths must be int64, got torch.float32"),
        (torch.tensor([4]), ValueError, "lengths must be from 0 to T = 3, got 4"),
        (torch.tensor([-1]), ValueError, "lengths must be from 0 to T = 3, got -1"),
        (torch.tensor([1, 2]), ValueError, r"lengths must be \(1,\)"),
    ],
)
def test_lengths_are_checked(mixer, lengths, error, words):
    with pytest.raises(error, match=words):
        mixer(torch.zeros(1, 3, C), mixer.init_state(1), lengths=lengths)


@pytest.mark.parametrize("state_device", ["cpu", "meta"])
def test_a_call_before_the_weights_move_to_a_device_spoils_no_later_one(mixer, state_device):
    x, state = torch.zeros(1, 3, C, device="meta"), mixer.init_state(1)
    with pytest.raises((RuntimeError, ValueError)):
        mixer(x, type(state)(*(part.to(state_device) for part in state)))
    mixer.to("meta")
    assert mixer(x, mixer.init_state(1))[0].shape == (1, 3, C)


def test_step_takes_one_token_a_row_and_no_gradients(mixer):
    state = mixer.reserve(mixer.init_state(2), 4)
    with pytest.raises(RuntimeError, match="step overwrites the state"):
        mixer.step(torch.zeros(2, 1, C), state)
    with torch.no_grad():
        for tokens in (0, 2):
            with pytest.raises(ValueError, match="one token of each row"):
                mixer.step(torch.zeros(2, tokens, C), state)
