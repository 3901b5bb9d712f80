"""Each holder of a stream for captures has one of its own, although torch hands out few in turn."""

from itertools import cycle
from weakref import WeakSet

import pytest
import torch
from mezzo_core.ops import capture_streams
from mezzo_core.ops.capture_streams import STREAMS, capture_stream


class Stream:
    """Stands for a stream of a GPU: two objects can be the same stream."""

    turn = cycle(range(STREAMS))

    def __init__(self, device):
        self.cuda_stream = next(self.turn)

    def __eq__(self, other):
        return self.cuda_stream == other.cuda_stream

    def __hash__(self):
        return hash(self.cuda_stream)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_two_holders_share_a_stream_until_all_are_held(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(capture_streams, "_held", WeakSet())
    first = capture_stream(torch.device(device))
    for _ in range(STREAMS):
        assert capture_stream(torch.device(device)) != first  # and is given back at once
    held = [first, *(capture_stream(torch.device(device)) for _ in range(STREAMS - 1))]
    assert len({stream.cuda_stream for stream in held}) == STREAMS
    assert capture_stream(torch.device(device)) in held
