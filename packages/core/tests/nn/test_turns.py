"""Continuous batching: prompts that take turns in few rows get the same tokens as alone."""

import pytest
import torch
from mezzo_core.nn.generate import generate, stream
from mezzo_core.nn.prompts import SegmentGraph, read_prompts
from mezzo_core.nn.state import grows, put_rows_
from mezzo_core.nn.turns import Turns

from .kinds import build

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 10, 11], [4, 4], [12, 1, 30, 7], [9], [20, 21]]
SEEDS = [5, 6, 5, 8, 2, 5, 0]
WAYS = {
    "greedy": {},
    "sampled": {"temperature": 1.5, "repetition_penalty": 1.4, "logit_bias": {3: 1.0}},
}
ENDS = {"max_new_tokens": 9, "stop_tokens": range(0, 37, 4)}


def alone(model, way, **options):
    return [
        generate(model, [prompt], **{**ENDS, **WAYS[way], "seed": [seed]}, **options)[0]
        for prompt, seed in zip(PROMPTS, SEEDS, strict=True)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_prompts_that_take_turns_continue_as_each_alone(any_model, way):
    expected = alone(any_model, way)
    assert len({len(row) for row in expected}) > 1, "rows end at different times"
    for num_rows in (1, 3):
        found = generate(any_model, PROMPTS, num_rows=num_rows, seed=SEEDS, **ENDS, **WAYS[way])
        assert found == expected


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_wait_to_be_read_together_change_no_token(any_model, way):
    """Waiting rows whose room ends meanwhile are reset."""
    many, seeds = PROMPTS * 3, SEEDS * 3
    found = generate(any_model, many, num_rows=5, seed=seeds, **ENDS, **WAYS[way])
    assert found == alone(any_model, way) * 3


@pytest.mark.parametrize("way", WAYS)
def test_prompts_that_are_read_as_in_a_graph_continue_as_each_alone(model, way, monkeypatch):
    """A quarter of the rows at a time, and few tokens of them: all segments have the same shape."""
    begin, shapes = Turns.__post_init__, []

    def begin_in_graph(turns):
        begin(turns)
        turns.in_graph = SegmentGraph(turns.model, turns.quarter, 3)

    monkeypatch.setattr(Turns, "__post_init__", begin_in_graph)
    model.embed.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape))
    with torch.no_grad():
        _, state = model(torch.tensor([[7, 7, 2]]), model.init_state(1))
    for before in (None, state):
        expected = alone(model, way, state=before) * 3
        options = {"seed": SEEDS * 3, "state": before, **ENDS, **WAYS[way]}
        shapes.clear()
        assert generate(model, PROMPTS * 3, num_rows=6, **options) == expected
        assert set(shapes) == {(2, 3), (6, 1)}


def test_a_segment_of_one_shape_reads_prompts_as_the_model_does(model, monkeypatch):
    """Whatever it has read before, and where first states share tensors."""
    first_of = model.stack.blocks[0].init_state
    monkeypatch.setattr(model.stack, "init_state", lambda batch: (first_of(batch),) * 2)
    read = SegmentGraph(model, 7, 4)
    with torch.no_grad():
        for prompts in (PROMPTS, [[1] * 9] * 7, PROMPTS[:2]):
            logits, state = read_prompts(model, prompts)
            found, after = read.read_prompts(prompts)
            first = model.select(after, range(len(prompts)))
            torch.testing.assert_close((found, first), (logits, state))


def test_a_row_that_nobody_needs_keeps_to_its_room(any_model):
    """It ends at once and waits for all others, longer than its room, but no prompt needs it."""
    prompts = [[token] for token in range(10)]
    firsts = generate(any_model, prompts, max_new_tokens=1)
    early = next(firsts[i] for i in range(2, 8) if firsts.count(firsts[i]) == 1)
    ends = {"max_new_tokens": 9, "stop": lambda tokens: tokens == early}
    expected = generate(any_model, prompts, **ends)
    assert generate(any_model, prompts, num_rows=8, **ends) == expected


def test_prompts_are_read_where_a_quarter_of_the_rows_is_free(model):
    read = []
    model.norm.register_forward_hook(lambda _, inputs, __: read.append(len(inputs[0])))
    ends = {"max_new_tokens": 20, "stop": lambda tokens: len(tokens) >= 2 + sum(tokens[:2]) % 13}
    prompts = [[token] for token in range(36)]
    found = generate(model, prompts, num_rows=8, **ends)
    assert len({len(row) for row in found}) > 5, "rows end at different times"
    *together, last = [count for count in read if count != 8]
    assert together
    assert set(together) <= {2, 3, 4, 5, 6, 7}
    assert sum(together) + last == 36 - 8


def test_what_comes_before_all_prompts_is_read_once(any_model):
    with torch.no_grad():
        _, state = any_model(torch.tensor([[7, 7, 2]]), any_model.init_state(1))
    expected = alone(any_model, "greedy", state=state)
    assert generate(any_model, PROMPTS, num_rows=2, state=state, **ENDS) == expected


@torch.no_grad()
def test_models_that_can_go_back_take_turns_too(any_model):
    rewinding = any_model.rewinding(3)
    _, begun = rewinding(torch.tensor([[7, 7, 2, 5, 1]]), rewinding.init_state(1))
    for before in (None, begun, begun.state):
        plain = before.state if before is begun else before
        expected = alone(any_model, "greedy", state=plain)
        for num_rows in (2, None):
            found = generate(rewinding, PROMPTS, num_rows=num_rows, state=before, **ENDS)
            assert found == expected


def test_samples_take_turns_too(model):
    options = {"max_new_tokens": 6, "temperature": 1.5, "num_samples": 3, "seed": list(range(21))}
    assert generate(model, PROMPTS, num_rows=4, **options) == generate(model, PROMPTS, **options)


def test_a_row_that_is_free_is_filled_at_once(model):
    """The number of steps is that of the busiest row, not the sum over batches."""
    calls = []
    model.norm.register_forward_hook(lambda _, inputs, __: calls.append(tuple(inputs[0].shape)))
    stop = lambda tokens: len(tokens) == tokens_of[tuple(tokens[:1])]  # noqa: E731
    first = generate(model, [[1], [2], [3]], max_new_tokens=1)
    assert len({tuple(row) for row in first}) == 3
    tokens_of = dict(zip(map(tuple, first), (8, 2, 7), strict=True))
    calls.clear()
    found = generate(model, [[1], [2], [3]], num_rows=2, max_new_tokens=20, stop=stop)
    assert [len(row) for row in found] == [8, 2, 7]
    assert calls.count((2, 1, 16)) - 1 == 7, "after the prompts: as many steps as the longest has"
    assert calls.count((1, 1, 16)) == 1, "the third prompt is read when the second has ended"


def test_a_stream_gives_each_prompt_its_tokens_in_their_order(model):
    rows = [[] for _ in PROMPTS]
    for step in stream(model, PROMPTS, num_rows=2, **ENDS):
        assert 0 < sum(token is not None for token in step) <= 2
        for row, token in zip(rows, step, strict=True):
            row.extend([] if token is None else [token])
    assert rows == alone(model, "greedy")


def test_one_token_each_needs_no_step(any_model):
    one = {"max_new_tokens": 1}
    assert generate(any_model, PROMPTS, num_rows=2, **one) == generate(any_model, PROMPTS, **one)


def test_prompts_that_all_end_at_once_give_nothing(model):
    assert generate(model, PROMPTS, num_rows=2, max_new_tokens=5, stop_tokens=range(37)) == [[]] * 7
    assert not list(stream(model, PROMPTS, num_rows=2, max_new_tokens=5, stop_tokens=range(37)))


def test_a_model_of_no_numbers_says_so(model):
    with torch.no_grad():
        model.embed.weight[20] = float("nan")
    with pytest.raises(ValueError, match="the model's outputs are no numbers"):
        generate(model, PROMPTS, num_rows=2, max_new_tokens=3)


def test_a_state_of_many_rows_cannot_come_before_prompts_that_take_turns(model):
    with pytest.raises(ValueError, match="state must have 1 row where num_rows is given, got 7"):
        generate(model, PROMPTS, num_rows=2, max_new_tokens=3, state=model.init_state(7))


def test_rows_of_another_window_are_refused(config):
    model = build(config, "window")
    states = [model.reserve(model.init_state(1), room) for room in (2, 3)]
    with pytest.raises(ValueError, match=r"put_rows_: rows of .* reserve room for as many tokens"):
        put_rows_(states[0], [0], states[1], model.stack.overwritten())


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
def test_on_a_gpu_no_graph_is_captured_anew_when_a_row_changes(any_model, way, monkeypatch):
    any_model.cuda()
    expected = alone(any_model, way)
    captures, capture = [], torch.cuda.CUDAGraph.capture_begin
    monkeypatch.setattr(
        torch.cuda.CUDAGraph,
        "capture_begin",
        lambda graph, *args, **kwargs: (captures.append(1), capture(graph, *args, **kwargs))[1],
    )
    found = generate(any_model, PROMPTS, num_rows=2, seed=SEEDS, **ENDS, **WAYS[way])
    assert found == expected
    keeps_its_size = not grows(any_model.init_state(1))
    assert len(captures) == 1 + keeps_its_size, "a step, and where it can be a segment of prompts"
