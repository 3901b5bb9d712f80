"""A wrong argument of a layer or a configuration gives one line, or a right result."""

import pytest
import torch
from mezzo_core.testing.arguments import check_fields, check_module_arguments
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig

D, C = 4, 8
MIXERS = {
    "rat": RATConfig(chunk_size=2, head_dim=D, num_groups=1),
    "linear_rnn": LinearRNNConfig(span=8),
    "reversed": RATReversedConfig(chunk_size=2, head_dim=D, gate_rank=2, span=4),
}


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", MIXERS)
def test_each_argument_replaced_is_named_or_right(name):
    check_module_arguments(MIXERS[name].build(C))


@torch.no_grad()
def test_a_state_without_the_ends_of_its_closed_chunks_is_refused():
    mixer, x = MIXERS["rat"].build(C), draw(2, 7, C)
    _, state = mixer(x, mixer.init_state(2))
    few = torch.tensor([1, 0])
    for slots, lengths in ((2, state.lengths), (0, state.lengths), (4, -state.lengths), (0, few)):
        bad = state._replace(
            k_ends=state.k_ends[:, :slots], v_ends=state.v_ends[:, :slots], lengths=lengths
        )
        for call in (lambda bad: mixer(x, bad), lambda bad: mixer.reserve(bad, 3)):
            with pytest.raises(ValueError, match=r"state\.lengths must be from 0 to N"):
                call(bad)


@pytest.mark.parametrize("name", MIXERS)
def test_each_field_replaced_is_named_or_right(name):
    check_fields(MIXERS[name], lambda config: config.build(C)(draw(2, 3, C))[0])
