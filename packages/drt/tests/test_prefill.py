"""A prefill is exact, though upper layers run over the last places of a prompt only."""

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from mezzo_core.testing.numerics import assert_close
from mezzo_drt import DRTConfig
from torch import nn
from torch.utils._pytree import tree_leaves

C, L, W = 12, 4, 7
CONFIG = DRTConfig(
    num_layers=4, num_groups=2, chunk_size=L, num_retrieved=2, window_size=W, head_dim=6,
    hidden=20, num_encoder_layers=1, gumbel_noise=False,
)  # fmt: skip
FORMS = {
    "two groups": CONFIG,
    "one group": replace(CONFIG, num_groups=1),
    "a window shorter than a chunk": replace(CONFIG, window_size=3),
    "text": replace(CONFIG, residual="text", softmax1=False),
    "fixed": replace(CONFIG, retriever="fixed"),
    "random": replace(CONFIG, retriever="random"),
    "offload": replace(CONFIG, offload=True),
    "eight layers": replace(CONFIG, num_layers=8),
}


def build(config):
    torch.manual_seed(0)
    stack = config.build(C)
    for module in stack.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.3)
    return stack.double().eval()


@contextmanager
def counted(stack):
    """Yield a list of how many places each call of the first upper layer has."""
    places = []
    hook = stack.upper[0].register_forward_hook(lambda _, args, out: places.append(len(args[0][0])))
    yield places
    hook.remove()


@pytest.mark.parametrize("form", FORMS)
def test_the_last_output_and_all_that_follows_are_those_of_a_forward(form):
    """Prompts begin and end at every place of a chunk; what follows is a segment, or steps."""
    stack = build(FORMS[form])
    needed = len(stack.upper) * max(stack.config.window_size, L + 1) + L + 1
    for before, num_tokens in enumerate(range(needed + 2 * L, needed + 3 * L + 1)):
        x = torch.randn(2, before + num_tokens + 2 * W, C, dtype=torch.float64)
        end = before + num_tokens
        with torch.no_grad(), counted(stack) as places:
            full, _ = stack(x)
            state = stack(x[:, :before], stack.init_state(2))[1]
            places.clear()
            last, after = stack.prefill(x[:, before:end], state)
            assert needed <= places[0] < needed + L + 1, "other places were run than are needed"
            rest, _ = stack(x[:, end:], after)
            steps, stepping = [], stack.reserve(after, 2 * W)
            for t in range(end, x.shape[1]):
                stack.before_step(stepping)
                steps.append(stack.step(x[:, t : t + 1], stepping))
        for name, found in (("segment", rest), ("steps", torch.cat(steps, 1))):
            whole = torch.cat([last, found], 1)
            assert_close(f"{num_tokens} tokens, {name}", whole, full[:, end - 1 :], rtol=1e-12)


def test_padding_behind_rows_of_one_length_changes_nothing():
    """Also if a landmark follows the last token, or the segment ends with it."""
    stack = build(CONFIG)
    for length in range(40, 40 + L + 1):
        x, state = torch.randn(2, length + 3, C, dtype=torch.float64), stack.init_state(2)
        with torch.no_grad(), counted(stack) as places:
            last, after = stack.prefill(x[:, :length], state)
            for T in (length, length + 3):
                lengths = torch.full((2,), length)
                padded = stack.prefill(x[:, :T], state, lengths=lengths)
                assert torch.equal(padded[0], last)
                assert all(map(torch.equal, tree_leaves(padded[1]), tree_leaves(after)))
        assert len(set(places)) == 1
        assert places[0] < length


def test_prompts_may_be_read_in_segments_of_any_size():
    stack = build(CONFIG)
    x = torch.randn(1, 150, C, dtype=torch.float64)
    with torch.no_grad():
        state = stack.init_state(1)
        for part in x.split([40, 1, 2, 64, 43], 1):
            last, state = stack.prefill(part, state)
            assert last.shape == (1, 1, C)
        assert_close("last", last, stack(x)[0][:, -1:], rtol=1e-12)


def test_rows_at_different_places_are_read_by_all_layers():
    stack = build(CONFIG)
    x, more = (torch.randn(2, T, C, dtype=torch.float64) for T in (60, 50))
    lengths = torch.tensor([60, 35])
    with torch.no_grad(), counted(stack) as places:
        last, state = stack.prefill(x, stack.init_state(2), lengths=lengths)
        then, _ = stack.prefill(more, state)
        assert places == [60 + 60 // L, 50 + 50 // L + 1]
        for row, n in enumerate(lengths):
            whole = torch.cat([x[row, :n], more[row]])[None]
            expected = stack(whole)[0]
            assert_close("last", last[row, 0], expected[0, n - 1], rtol=1e-12)
            assert_close("then", then[row, 0], expected[0, -1], rtol=1e-12)


def test_the_gradient_is_that_of_a_forward():
    stack = build(CONFIG)
    x = torch.randn(1, 60, C, dtype=torch.float64, requires_grad=True)
    weights = [w for w in stack.parameters() if w.requires_grad]
    found = {}
    for way in ("forward", "prefill"):
        y, _ = getattr(stack, way)(x, stack.init_state(1))
        found[way] = torch.autograd.grad(y[:, -1].square().sum(), [x, *weights])
    for i, (dx, expected) in enumerate(zip(found["prefill"], found["forward"], strict=True)):
        assert_close(f"gradient {i}", dx, expected, rtol=1e-12)


def test_the_state_before_it_stays_as_it_is():
    stack = build(CONFIG)
    x = torch.randn(2, 80, C, dtype=torch.float64)
    with torch.no_grad():
        state = stack(x[:, :10], stack.init_state(2))[1]
        kept = [part.clone() for part in tree_leaves(state)]
        stack.prefill(x[:, 10:], state)
    assert all(map(torch.equal, tree_leaves(state), kept))
