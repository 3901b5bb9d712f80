"""The memory of chunks grows in place, and no state that still lives is harmed."""

from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from mezzo_core.testing.numerics import assert_close
from mezzo_drt import DRTConfig, layer
from mezzo_drt.memory import store
from mezzo_drt.memory.store import room_of
from torch.utils._pytree import tree_leaves, tree_map, tree_structure, tree_unflatten

C, L = 12, 4
CONFIG = DRTConfig(
    num_layers=2, chunk_size=L, num_retrieved=2, window_size=5, head_dim=6, hidden=20,
    num_encoder_layers=1,
)  # fmt: skip


def build(**fields):
    torch.manual_seed(0)
    stack = replace(CONFIG, **fields).build(C)
    for weight in stack.parameters():
        torch.nn.init.normal_(weight, std=0.4)
    return stack.eval()


@pytest.fixture(params=[False, True], ids=["device", "offload"])
def stack(request):
    return build(offload=request.param)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


def run(stack, x, size, state=None):
    state = stack.init_state(len(x)) if state is None else state
    outputs = []
    for segment in x.split(size, 1):
        y, state = stack(segment, state)
        outputs.append(y)
    return torch.cat(outputs, 1), state


def places(state):
    return [part.data_ptr() for part in state.memory]


@pytest.mark.parametrize("size", [1, 3, L, 9])
def test_segments_copy_the_memory_only_when_its_room_doubles(stack, size):
    x = torch.randn(2, 64 * L, C)
    state, made = stack.init_state(2), []  # made: chunks for which buffers were made
    for segment in x.split(size, 1):
        before = state
        _, state = stack(segment, state)
        room = room_of(state.memory)
        if places(state) != places(before):
            made.append(room.capacity)
        assert room is None or room.filled == state.memory.keys.shape[1] <= room.capacity
    assert state.memory.keys.shape[1] == 64
    assert sum(made) <= 4 * 64, f"copies grow like a square: {made}"


def test_chunks_of_a_wider_dtype_are_not_rounded(stack):
    x = torch.randn(1, 6 * L, C)
    with torch.autocast("cpu", torch.bfloat16):
        _, state = run(stack, x[:, : 5 * L], L)
    assert state.memory.k.dtype == torch.bfloat16
    assert room_of(state.memory).capacity > 5
    _, after = stack(x[:, 5 * L :], state)
    assert after.memory.k.dtype == torch.float32
    assert stack.bfloat16().init_state(1).weights.dtype == torch.float32


def test_branches_of_one_state_do_not_meet(stack):
    x = torch.randn(2, 60 * L, C)
    whole, _ = stack(x)
    others = [torch.cat([x[:, : 20 * L], torch.randn(2, 25 * L, C)], 1) for _ in range(3)]
    _, trunk = run(stack, x[:, : 20 * L], 7)
    kept = [leaf.clone() for leaf in tree_leaves(trunk)]
    ends = [run(stack, other[:, 20 * L : 32 * L], 5, trunk)[1] for other in others]
    for other, end in zip(others, ends, strict=True):
        y, _ = run(stack, other[:, 32 * L :], 6, end)
        assert_close("a branch", y, stack(other)[0][:, 32 * L :], rtol=1e-5)
    y, _ = run(stack, x[:, 20 * L :], 11, trunk)
    assert_close("the trunk, later", y, whole[:, 20 * L :], rtol=1e-5)
    assert all(map(torch.equal, kept, tree_leaves(trunk)))
    assert len({places(end)[1] for end in ends}) == 3


def test_only_the_newest_state_appends(stack):
    _, trunk = run(stack, torch.randn(1, 9 * L, C), L)
    x = torch.randn(1, L, C)
    first, second = stack(x, trunk)[1], stack(x, trunk)[1]
    assert places(first) == places(trunk)
    assert places(second) != places(trunk)
    assert room_of(first.memory).filled == 10


def test_of_two_threads_that_go_on_from_a_state_only_one_appends(stack, monkeypatch):
    """Here all of one runs while the other looks at the buffers."""
    _, trunk = run(stack, torch.randn(1, 9 * L, C), L)
    x, others, look = torch.randn(1, L, C), [], store.room_of

    def look_meanwhile(*args):
        monkeypatch.setattr(store, "room_of", look)
        others.append(stack(x, trunk)[1])
        return look(*args)

    monkeypatch.setattr(store, "room_of", look_meanwhile)
    mine = stack(x, trunk)[1]
    assert places(others[0]) == places(trunk)
    assert places(mine) != places(trunk)


COPIES = {
    "cloned": lambda state: tree_map(torch.clone, state),
    "deep": deepcopy,
    "twice the rows": lambda state: tree_map(lambda t: t.repeat_interleave(2, 0), state),
    "a row, expanded": lambda state: tree_map(lambda t: t[:1].expand(4, *t.shape[1:]), state),
    "every second row": lambda state: tree_map(lambda t: t[::2], state),
    "other memory": lambda state: state._replace(
        memory=type(state.memory)(*(part.clone() for part in state.memory))
    ),
}


@pytest.mark.parametrize("copy", COPIES)
def test_states_made_of_a_states_tensors_go_on_alone(stack, copy):
    x = torch.randn(4, 11 * L, C)
    _, state = run(stack, x[:, : 9 * L], L)
    rows = COPIES[copy](tree_map(lambda t: t, state._replace(wait=torch.arange(4))))
    other = COPIES[copy](state)
    which = rows.wait.tolist()
    assert room_of(state.memory).capacity > 10
    after = torch.randn(len(which), 2 * L, C)
    wanted, _ = stack(torch.cat([x[which, : 9 * L], after], 1))
    y, _ = run(stack, after, L, other)
    assert_close("the copy", y, wanted[:, 9 * L :], rtol=1e-5)
    y, _ = run(stack, x[:, 9 * L :], L, state)
    assert_close("the state itself", y, stack(x)[0][:, 9 * L :], rtol=1e-5)


def test_prompts_that_have_ended_do_not_make_the_others_copy(stack):
    x, ends = torch.randn(3, 40 * L, C), torch.tensor([40 * L, 9, 0])
    state, copies = stack.init_state(3), 0
    for start in range(0, 40 * L, 6):
        segment = x[:, start : start + 6]
        lengths = (ends - start).clamp(0, segment.shape[1])
        before = state
        _, state = stack(segment, state, lengths=lengths)
        copies += places(state) != places(before)
    assert copies <= 7
    y, _ = stack(x[:, : 3 * L], state)
    for row, end in enumerate(ends):
        wanted, _ = stack(torch.cat([x[row, :end], x[row, : 3 * L]])[None])
        assert_close(f"row {row}", y[row], wanted[0, end:], rtol=1e-5)


def test_a_forward_leaves_a_state_that_steps_its_own_buffers(stack):
    x = torch.randn(1, 20 * L, C)
    _, state = run(stack, x[:, : 10 * L], L)
    state = stack.reserve(state, 10 * L)
    for t in range(10 * L, 15 * L):
        stack.before_step(state)
        stack.step(x[:, t : t + 1], state)
    run(stack, torch.randn(1, 4 * L, C), L, state)
    for t in range(15 * L, 20 * L):
        stack.before_step(state)
        y = stack.step(x[:, t : t + 1], state)
    assert_close("the last step", y, stack(x)[0][:, -1:], rtol=1e-5)


def test_a_forward_takes_no_room_for_the_steps_that_a_state_had_room_for(stack):
    x = torch.randn(1, 4 * L, C)
    state = stack.reserve(stack.init_state(1), 1000 * L)
    y, state = run(stack, x, 2 * L, state)
    assert room_of(state.memory).capacity <= 8
    assert_close("outputs", y, stack(x)[0], rtol=1e-5)


def test_reserve_takes_room_that_is_there_and_leaves_the_state_as_it_was(stack):
    x = torch.randn(2, 20 * L, C)
    _, given = run(stack, x[:, : 9 * L], L)
    assert room_of(given.memory).capacity == 16
    kept = [leaf.clone() for leaf in tree_leaves(given)]
    state = stack.reserve(given, 7 * L)
    assert places(state) == places(given)
    again = stack.reserve(given, 7 * L)
    assert places(again) != places(given), "the room has been given away"
    assert places(stack.reserve(state, L)) != places(state), "so has that for its own steps"
    for t in range(9 * L, 16 * L):
        for mine, token in ((state, x[:, t : t + 1]), (again, torch.randn(2, 1, C))):
            stack.before_step(mine)
            y = stack.step(token, mine)
            if mine is state:
                assert_close(f"step {t}", y, stack(x[:, : t + 1])[0][:, -1:], rtol=1e-5)
    assert all(map(torch.equal, kept, tree_leaves(given)))
    y, _ = run(stack, x[:, 9 * L :], 5, given)
    assert_close("the state given", y, stack(x)[0][:, 9 * L :], rtol=1e-5)
    assert places(stack.reserve(given, 30 * L)) != places(given), "so much room there is not"


def test_inference_mode_may_end_between_segments(stack):
    x = torch.randn(1, 12 * L, C)
    with torch.inference_mode():
        _, state = run(stack, x[:, : 9 * L], L)
    y, _ = run(stack, x[:, 9 * L :], L, state)
    assert_close("outputs", y, stack(x)[0][:, 9 * L :], rtol=1e-5)


def test_gradients_flow_through_the_memory_of_segments(stack):
    with torch.enable_grad():
        x = torch.randn(2, 9 * L, C, requires_grad=True)
        dy = torch.randn(2, 9 * L, C)
        (wanted,) = torch.autograd.grad(stack(x)[0], x, dy)
        (found,) = torch.autograd.grad(run(stack, x, 7)[0], x, dy)
    assert_close("dx", found, wanted, rtol=1e-5)


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_gradients_flow_through_reserve_and_select(stack, num_tokens):
    with torch.enable_grad():
        x = torch.randn(2, 9 * L, C, requires_grad=True)
        dy = torch.randn(2, 3 * L, C)
        _, state = run(stack, x[:, : 6 * L], 7)
        state = stack.select(stack.reserve(state, num_tokens), [0, 1])
        y, _ = stack(x[:, 6 * L :], state)
        (found,) = torch.autograd.grad(y, x, dy)
        (wanted,) = torch.autograd.grad(stack(x)[0][:, 6 * L :], x, dy)
    assert_close("dx", found, wanted, rtol=1e-5)


def shorter(cache):
    return cache._replace(k=cache.k[:, 1:], v=cache.v[:, 1:])


CUT = {
    "memory": lambda s: s._replace(memory=type(s.memory)(*(part[:, :6] for part in s.memory))),
    "indices": lambda s: s._replace(indices=torch.full_like(s.indices, 7)),
    "indices(?# below -1)": lambda s: s._replace(indices=torch.full_like(s.indices, -2)),
    r"caches\[1\]\.k": lambda s: s._replace(caches=(s.caches[0], shorter(s.caches[1]))),
    "lengths": lambda s: s._replace(caches=tuple(map(shorter, s.caches))),
    r"caches\[1\]\.lengths": lambda s: s._replace(
        caches=(s.caches[0], s.caches[1]._replace(lengths=s.caches[1].lengths - 1))
    ),
}


@pytest.mark.parametrize("cut", CUT)
def test_a_state_whose_parts_do_not_belong_together_is_refused_and_left_alone(stack, cut):
    x = torch.randn(2, 7 * L, C)
    state = stack.reserve(run(stack, x, L)[1], L)
    bad = CUT[cut](state)
    kept = [leaf.clone() for leaf in tree_leaves(bad)]
    calls = [
        lambda: stack(x, bad),
        lambda: stack.before_step(bad),
        lambda: stack.step(x[:, :1], bad),
        lambda: stack.reserve(bad, 1),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=rf"state\.{cut} must"):
            call()
    # Unwritten room may hold any bits, even those of NaN.
    for old, now in zip(kept, tree_leaves(bad), strict=True):
        torch.testing.assert_close(now, old, rtol=0, atol=0, equal_nan=True)


def test_steps_overwrite_all_but_the_memory_of_chunks(stack):
    state = stack.init_state(1)
    told = tree_unflatten(stack.overwritten(), tree_structure(state))
    assert not any(told.memory)
    assert all(tree_leaves(told._replace(memory=())))


def test_the_work_before_a_step_names_a_state_of_another_kind(stack):
    with pytest.raises(TypeError, match="state must be a DRTState of this module's"):
        stack.before_step((torch.zeros(1),))


@pytest.mark.parametrize("way", ["forward", "steps", "steps of a state from before"])
def test_what_a_backward_may_need_is_not_overwritten(way, monkeypatch):
    """The kernels save the buffers that they read; torch would notice a write by their version."""
    stack, x, saved = build(), torch.randn(1, 2 * L, C), []
    attend = layer.grouped_cross_attention
    _, state = run(stack, torch.randn(1, 9 * L, C), L)
    steps = stack.reserve(state, L + 1) if way == "steps of a state from before" else None
    with monkeypatch.context() as patch, torch.enable_grad():
        patch.setattr(
            layer,
            "grouped_cross_attention",
            lambda q, k, *rest, **form: (
                saved.append((k, k._version)) or attend(q, k, *rest, **form)
            ),
        )
        stack(x[:, :1], state)
    if way == "forward":
        run(stack, x, L, state)
    else:
        steps = stack.reserve(state, L + 1) if steps is None else steps
        for t in range(L + 1):
            stack.before_step(steps)
            stack.step(x[:, t : t + 1], steps)
    assert len(saved) == len(stack.upper)
    assert all(k._version == version for k, version in saved)


def test_calls_with_gradients_that_complete_no_chunk_copy_only_what_another_state_may_write(stack):
    x = torch.randn(1, L, C)
    _, state = run(stack, torch.randn(1, 9 * L, C), L)
    _, other = run(stack, torch.randn(1, 9 * L, C), L)
    stack(x, other)  # writes to the room
    with torch.enable_grad():
        for _ in range(2):
            assert places(stack(x[:, :1], state)[1]) == places(state)
        is_copied = places(stack(x[:, :1], other)[1]) != places(other)
    assert is_copied != stack.config.offload, "a backward reads what was fetched, not the host's"


def test_a_landmark_is_looked_for_only_when_it_may_be_due(stack, monkeypatch):
    """On a GPU each look waits."""
    looks = []
    monkeypatch.setattr(
        type(stack.init_state(1)),
        "num_places",
        lambda state: looks.append(1) or state.caches[0].lengths,
    )
    x = torch.randn(2, 5 * L, C)
    state = stack.reserve(stack.init_state(2), 4 * L)
    found = []
    for t in range(4 * L):
        looks.clear()
        stack.before_step(state)
        found.append(bool(looks))
        stack.step(x[:, t : t + 1], state)
    assert found == [t % L == 0 for t in range(4 * L)]
    stack.before_step(state)
    stack.before_step(state)  # calls that no step follows only make it look earlier
    y = stack.reserve(state, 1)
    stack.before_step(y)
    assert_close(
        "y", stack.step(x[:, 4 * L : 4 * L + 1], y), stack(x)[0][:, 4 * L, None], rtol=1e-5
    )
