"""Replayed calls: which calls are replayed, and that they give what other calls give."""

import gc
import re
import threading
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from mezzo_core.ops import launch as launching  # noqa: E402
from mezzo_core.ops import replay  # noqa: E402
from mezzo_core.ops.launch import launch  # noqa: E402
from mezzo_core.ops.replay import replayed  # noqa: E402
from mezzo_core.ops.scan import linear_scan  # noqa: E402
from mezzo_core.ops.watched import thread  # noqa: E402
from mezzo_core.testing.replays import assert_replayed, held, replays  # noqa: E402

SOURCES = Path(__file__).parents[4].glob("packages/*/src/*/ops/**/*.py")


@triton.jit
def add_kernel(x, y, out, n, factor, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(x + at, mask=at < n) + factor * tl.load(y + at, mask=at < n)
    tl.store(out + at, total, mask=at < n)


def add(x, y, factor, out=None):
    out = torch.empty_like(x) if out is None else out
    launch(add_kernel, (-(-x.numel() // 16),), x, y, out, x.numel(), factor, BLOCK=16)
    return out


class Counted:
    """A function that is replayed, and counts how often it runs itself."""

    def __init__(self, run):
        self.count = 0
        self.call = replayed(self.run)
        self._run = run

    def run(self, *inputs):
        self.count += 1
        return self._run(*inputs)


def twice(x, y, factor):
    """Return two results, of which one goes through a temporary tensor; and None."""
    between = add(x, y, factor)
    return add(between, x[4:].view(-1)[: x.numel()] if x.ndim > 1 else y, 2.0), None, add(y, y, 1.0)


def numbers(*shape, device, dtype=torch.float32):
    return torch.randn(*shape, device=device).to(dtype)


def equal(found, expected):
    pairs = zip(found, expected, strict=True)
    return all(a is b is None or torch.equal(a, b) for a, b in pairs)


def test_a_call_of_a_known_form_runs_nothing_but_its_kernels(device):
    counted = Counted(twice)
    with replays() as done:
        for i in range(5):
            x, y = (numbers(40, device=device) for _ in range(2))
            found = counted.call(x, y, 0.5)
            assert equal(found, twice(x, y, 0.5))
            assert type(found) is tuple
            assert counted.count == min(i + 1, 2)
    assert len(done) == 3
    assert len(done[0].calls) == 3
    assert sum(each is not None for each in done[0].results) == 2


def test_temporary_tensors_are_as_far_apart_as_the_allocator_s(device):
    def run(x):
        return add(add(x, x, 1.0), add(x, x, 2.0), 1.0)

    call = replayed(run)
    with replays() as done:
        for _ in range(3):
            x = numbers(9, device=device)
            assert torch.equal(call(x), run(x))
    offsets = [offset for each in done[0].calls for _, _, offset, _ in each.places]
    assert {*offsets} == {0, replay.APART}
    assert done[0].workspace == 2 * replay.APART  # the result is not in it


def test_a_recording_keeps_no_memory_of_its_call(device):
    made = []

    def run(x):
        between = add(x, x, 1.0)
        made.append(weakref.ref(between.untyped_storage()))
        return add(between, x, 1.0)

    with replays() as done:
        call = replayed(run)
        for _ in range(3):
            call(numbers(16, device=device))
    gc.collect()
    assert len(done) == 1
    assert not held(done[0])
    assert [each() for each in made] == [None, None]


@pytest.mark.parametrize("what", ["shape", "strides", "dtype", "number", "list", "None"])
def test_another_form_is_not_taken_for_a_known_one(device, what):
    def run(x, others, factor):
        y = x if others is None else others[0]
        return add(x, y, factor)

    counted = Counted(run)
    x, y, factor = numbers(16, device=device), numbers(16, device=device), 2.0
    other = {
        "shape": (x[:12].clone(), [y[:12].clone()], factor),
        "strides": (numbers(32, device=device)[::2], [y], factor),
        "dtype": (x.half(), [y.half()], factor),
        "number": (x, [y], 3.0),
        "list": (x, [y, y], factor),
        "None": (x, None, factor),
    }[what]
    with replays():
        for _ in range(4):
            assert torch.equal(counted.call(x, [y], factor), run(x, [y], factor))
        assert counted.count == 2
        for i in range(4):
            assert torch.equal(counted.call(*other), run(*other))
            assert counted.count == min(i + 3, 4)


def test_inputs_that_share_memory_are_told_apart(device):
    """In the recorded call y begins where x's second half does, in the others elsewhere."""

    def run(x, y):
        half = x.view(2, -1)[1]
        return add(half, y, 1.0)

    counted = Counted(run)
    with replays() as done:
        x = numbers(32, device=device)
        for y in (x[16:], x[16:], x[:16], numbers(16, device=device), x[16:]):
            assert torch.equal(counted.call(x, y), run(x, y))
    assert len(done) == 3


def test_expanded_inputs_are_read_as_they_are(device):
    def run(x):
        return add(x[:, 0], x[:, 0], 1.0)

    counted = Counted(run)
    with replays() as done:
        for _ in range(4):
            x = numbers(16, 1, device=device).expand(16, 5)
            assert torch.equal(counted.call(x), run(x))
    assert len(done) == 2


def test_results_are_memory_of_their_own(device):
    counted = Counted(twice)
    with replays():
        x, y = (numbers(40, device=device) for _ in range(2))
        for _ in range(3):
            first = counted.call(x, y, 0.5)
        kept = [z.clone() for z in first if z is not None]
        second = counted.call(x, y, 0.25)
        second[0].zero_()
    assert equal([z for z in first if z is not None], kept)
    places = [z.untyped_storage() for z in (*first, *second) if z is not None]
    assert len({place.data_ptr() for place in places}) == 4
    assert all(place.nbytes() == 160 for place in places)


def shared(x):
    both = torch.empty(2, *x.shape, device=x.device)
    return add(x, x, 1.0, both[0]), add(x, x, 2.0, both[1])


UNREPEATED = {
    "arithmetic": lambda x: add(x, x, 1.0) * 2,
    "zeros": lambda x: add(x, x, 1.0, torch.zeros_like(x)),
    "a copy": lambda x: add(x.t().contiguous(), x, 1.0),
    "a value": lambda x: add(x, x, float(x[0, 0] > 0)),
    "results in one memory": shared,
    "a part of a memory": lambda x: add(x, x, 1.0, torch.empty(2, *x.shape, device=x.device)[1]),
    "an input returned": lambda x: (add(x, x, 1.0), x),
    "a result twice": lambda x: (add(x, x, 1.0),) * 2,
    "a dict": lambda x: {"out": add(x, x, 1.0)},
}


@pytest.mark.parametrize("what", UNREPEATED)
def test_what_does_more_than_to_launch_is_called_as_ever(device, what):
    counted = Counted(UNREPEATED[what])
    with replays() as done:
        for i in range(4):
            x = numbers(4, 4, device=device)
            found, expected = counted.call(x), UNREPEATED[what](x)
            if isinstance(found, dict):
                found, expected = found["out"], expected["out"]
            assert equal([*found], [*expected])
            assert counted.count == i + 1
    assert not done


def test_what_triton_launches_itself_is_called_as_ever(device):
    counted = Counted(lambda x: add(x, x, 1.0))
    with replays() as done, mock.patch.object(launching, "_is_plain", return_value=False):
        for _ in range(4):
            x = numbers(16, device=device)
            assert torch.equal(counted.call(x), 2 * x)
    assert (counted.count, done) == (4, [])


def test_no_launch_goes_around_the_recorder():
    around = {path.name for path in SOURCES if re.search(r"kernel\w*\[[^]]*\]\(", path.read_text())}
    assert around == {"launch.py"}


def captured(is_so):
    return mock.patch.object(replay, "_is_captured", return_value=is_so)


def test_tables_that_a_function_keeps_are_read_where_they_are(device):
    tables = []

    def run(x):
        if not tables:
            tables.append(numbers(16, device=device))
        return add(x, tables[0], 1.0)

    counted = Counted(run)
    with replays() as done:
        for _ in range(3):
            x = numbers(16, device=device)
            assert torch.equal(counted.call(x), x + tables[0])
        assert [*done[0].kept] == tables
        # A CUDA graph may live longer than the recording, which keeps the table.
        with captured(True):
            counted.call(x)
    assert (counted.count, len(done)) == (3, 1)


def test_nothing_is_recorded_into_a_cuda_graph(device):
    counted = Counted(lambda x: add(x, x, 1.0))
    x = numbers(16, device=device)
    with replays() as done:
        for is_so, count in [(True, 1), (True, 2), (True, 3), (False, 4), (True, 4)]:
            with captured(is_so):
                assert torch.equal(counted.call(x), 2 * x)
            assert counted.count == count
    assert len(done) == 1


@pytest.mark.parametrize("what", ["unaligned", "watched", "on another stream"])
def test_a_known_form_elsewhere_is_called_as_ever(device, what):
    counted = Counted(lambda x: add(x, x, 1.0))
    x = numbers(16, device=device)
    with replays() as done:
        for _ in range(3):
            counted.call(x)
        stream = {"watched": lambda _: None, "on another stream": lambda _: 7}
        if what == "unaligned":
            x = numbers(17, device=device)[1:]
        with mock.patch.object(replay, "_stream", stream.get(what, replay._stream)):
            assert torch.equal(counted.call(x), 2 * x)
    assert (counted.count, len(done)) == (3, 1)


def test_large_calls_are_not_recorded(device, monkeypatch):
    large, deep = Counted(lambda x: add(x, x, 1.0)), Counted(lambda x: twice(x, x, 1.0)[0])
    with replays() as done:
        monkeypatch.setattr(replay, "MOST_BYTES", 1000)
        for _ in range(3):
            large.call(numbers(300, device=device))
            deep.call(numbers(200, device=device))
    assert (large.count, deep.count, done) == (3, 3, [])


def test_what_has_no_memory_to_be_watched_is_called_as_ever(device):
    def run(x):
        if thread.recorder:
            raise torch.OutOfMemoryError
        return add(x, x, 1.0)

    counted = Counted(run)
    with replays() as done:
        for i in range(3):
            x = numbers(16, device=device)
            assert torch.equal(counted.call(x), 2 * x)
            assert counted.count == (1, 3, 4)[i]
    assert not done


def test_forms_are_forgotten_when_there_are_many(device, monkeypatch):
    monkeypatch.setattr(replay, "MOST_FORMS", 2)
    counted = Counted(lambda x, factor: add(x, x, factor))
    with replays() as done:
        x = numbers(16, device=device)
        for factor in (1.0, 1.0, 1.0, 2.0, 3.0, 1.0, 1.0, 1.0):
            assert torch.equal(counted.call(x, factor), (1 + factor) * x)
    assert (counted.count, len(done)) == (6, 2)


def test_threads_record_for_themselves(device):
    """One is recording while the other runs the same function."""
    inside, go_on = threading.Event(), threading.Event()

    def run(x):
        if threading.current_thread() is not threading.main_thread() and counted.count == 2:
            inside.set()
            assert go_on.wait(60)
        return add(x, x, 1.0)

    counted = Counted(run)
    found = []
    with replays() as done:
        x, y = (numbers(16, device=device) for _ in range(2))
        counted.call(x)
        other = threading.Thread(target=lambda: found.append(counted.call(y)))
        other.start()
        assert inside.wait(60)
        found.append(counted.call(x))
        go_on.set()
        other.join()
        assert torch.equal(found[0], 2 * x)
        assert torch.equal(found[1], 2 * y)
        assert torch.equal(counted.call(y), 2 * y)
    assert [len(each.calls) for each in done] == [1]


def test_a_function_within_another_is_a_part_of_it(device):
    inner = Counted(lambda x: add(x, x, 1.0))
    outer = Counted(lambda x: add(x, inner.call(x), 1.0))
    with replays() as done:
        for _ in range(4):
            x = numbers(16, device=device)
            assert torch.equal(outer.call(x), x + 2 * x)
    assert len(done[-1].calls) == 2
    assert outer.count == 2


def test_an_error_ends_the_recording(device):
    def run(x):
        if fails:
            raise ValueError("inside")
        return add(x, x, 1.0)

    fails, counted = [], Counted(run)
    with replays() as done:
        x = numbers(16, device=device)
        counted.call(x)
        fails.append(True)
        with pytest.raises(ValueError, match="inside"):
            counted.call(x)
        fails.clear()
        counted.call(x)
        assert torch.equal(counted.call(x), 2 * x)
    assert len(done) == 1


def test_the_scan(device):
    def draw():
        return {"a": torch.rand(2, 40, 16, device=device), "x": numbers(2, 40, 16, device=device)}

    assert_replayed(lambda **given: linear_scan(**given, impl="triton").out, draw)
