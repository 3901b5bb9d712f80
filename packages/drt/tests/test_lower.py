"""Mixers in the lower half: which ones are accepted. test_laws.py tests what they compute."""

from dataclasses import dataclass

import pytest
import torch
from mezzo_core.nn import AttentionConfig
from mezzo_core.nn.attention import Attention
from mezzo_core.nn.mlp import MLPConfig
from mezzo_drt import DRTConfig
from torch.utils._pytree import tree_leaves, tree_map

WINDOW = AttentionConfig(head_dim=4, window_size=6, rope_base=None, alibi="olmo")


class Fetching(Attention):
    def before_step(self, state, run=None):
        pass


@dataclass(frozen=True)
class FetchingConfig:
    def build(self, d_model):
        return Fetching(d_model, AttentionConfig(4))


def test_the_default_is_window_attention_under_the_same_names():
    config = DRTConfig(num_layers=4, chunk_size=3, window_size=6, head_dim=4, hidden=8)
    given = DRTConfig(**{**vars(config), "lower": (WINDOW, WINDOW)})
    first, second = (c.build(8).state_dict() for c in (config, given))
    assert {n: w.shape for n, w in first.items()} == {n: w.shape for n, w in second.items()}


@pytest.mark.parametrize(
    ("lower", "error", "says"),
    [
        ((WINDOW,), ValueError, "lower must have one mixer for each of 2 lower layers, or none"),
        ((WINDOW, MLPConfig()), TypeError, "MLPConfig builds no mixer"),
        ((WINDOW, FetchingConfig()), TypeError, r"lower\[1\] must not override before_step"),
    ],
)
def test_other_lower_layers_are_refused_in_one_line(lower, error, says):
    with pytest.raises(error, match=says):
        DRTConfig(num_layers=4, head_dim=4, lower=lower).build(8)


@torch.no_grad()
def test_a_step_for_which_one_mixer_has_no_room_changes_no_state():
    lower = (WINDOW, AttentionConfig(4))  # a window always has room
    config = DRTConfig(num_layers=4, chunk_size=9, window_size=2, head_dim=4, lower=lower)
    stack, x = config.build(8), torch.randn(1, 6, 8)
    state = stack.reserve(stack(x, stack.init_state(1))[1], 0)
    stack.step(x[:, :1], state)  # there is always room for a landmark
    kept = tree_map(torch.clone, state)
    with pytest.raises(ValueError, match="reserve more"):
        stack.step(x[:, :1], state)
    assert all(map(torch.equal, tree_leaves(state), tree_leaves(kept)))
