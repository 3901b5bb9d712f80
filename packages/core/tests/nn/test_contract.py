"""The contract of mixers refuses bad arguments; more of them are in tests/test_arguments.py."""

import pytest
import torch
from mezzo_core.nn.attention import AttentionConfig
from toys.running_mean import RunningMeanConfig

C = 16


@pytest.fixture
def mixer():
    return AttentionConfig(head_dim=8).build(C)


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        (
            lambda m: m.init_state(3),
            ValueError,
            r"state.k must be \(1, any, 2, 8\) .* \(3, 0, 2, 8",
        ),
        (lambda m: tuple(m.init_state(1)), TypeError, "state must be a KVCache .* got tuple"),
        (lambda m: m.init_state(1)._replace(v=None), TypeError, "state.v must be a tensor"),
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


@pytest.mark.parametrize("borders", [[0, 4], [0, 2, 1, 3]])
def test_borders_are_checked(mixer, borders):
    with pytest.raises(ValueError, match="never decrease and end at T = 3"):
        mixer(torch.zeros(1, 3, C), cu_seqlens=torch.tensor(borders))


@pytest.mark.parametrize("length", [4, -1])
def test_lengths_are_checked(mixer, length):
    with pytest.raises(ValueError, match=f"lengths must be from 0 to T = 3, got {length}"):
        mixer(torch.zeros(1, 3, C), mixer.init_state(1), lengths=torch.tensor([length]))


@pytest.mark.parametrize("state_device", ["cpu", "meta"])
def test_a_call_before_the_weights_move_to_a_device_spoils_no_later_one(mixer, state_device):
    x, state = torch.zeros(1, 3, C, device="meta"), mixer.init_state(1)
    with pytest.raises((RuntimeError, ValueError)):
        mixer(x, type(state)(*(part.to(state_device) for part in state)))
    mixer.to("meta")
    assert mixer(x, mixer.init_state(1))[0].shape == (1, 3, C)


def test_a_state_of_fixed_size_is_reserved_in_the_dtypes_of_the_weights():
    mixer = RunningMeanConfig().build(C)
    state = mixer.double().init_state(1)
    assert mixer.bfloat16().reserve(state, 1).sum.dtype == torch.bfloat16


def test_step_takes_one_token_a_row_and_no_gradients(mixer):
    state = mixer.reserve(mixer.init_state(2), 4)
    with pytest.raises(RuntimeError, match="step overwrites the state"):
        mixer.step(torch.zeros(2, 1, C), state)
    with torch.no_grad():
        for tokens in (0, 2):
            with pytest.raises(ValueError, match="one token of each row"):
                mixer.step(torch.zeros(2, tokens, C), state)
