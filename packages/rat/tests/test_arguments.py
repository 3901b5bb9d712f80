"""RAT's layers and configurations, each argument replaced: one clear line, or a right result."""

import pytest
import torch
from mezzo_core.testing.arguments import Call, check_arguments, check_fields
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig

B, T, D, C = 2, 5, 4, 8
MIXERS = {
    "rat": RATConfig(chunk_size=2, head_dim=D, num_groups=1),
    "linear_rnn": LinearRNNConfig(span=8),
    "reversed": RATReversedConfig(chunk_size=2, head_dim=D, gate_rank=2, span=4),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def of_mixer(name: str) -> list[Call]:
    mixer = MIXERS[name].build(C)

    def stepping():
        return {"x": draw(B, 1, C), "state": mixer.reserve(mixer.init_state(B), 3)}

    return [
        Call(mixer, lambda: {"x": draw(B, T, C)}),
        Call(mixer, lambda: {"x": draw(1, T, C), "cu_seqlens": torch.tensor([0, 2, T])}, MAY),
        Call(
            mixer,
            lambda: (
                {"x": draw(B, T, C), "state": mixer.init_state(B)}
                | {"lengths": torch.tensor([3, T])}
            ),
            MAY,
        ),
        Call(mixer.step, stepping),
    ]


MAY = frozenset({"state", "lengths", "cu_seqlens"})


@pytest.mark.parametrize("name", MIXERS)
def test_each_argument_replaced_is_named_or_right(name):
    for call in of_mixer(name):
        check_arguments(call)


@pytest.mark.parametrize("name", MIXERS)
def test_each_field_replaced_is_named_or_right(name):
    check_fields(MIXERS[name], lambda config: config.build(C)(draw(2, 3, C))[0])
