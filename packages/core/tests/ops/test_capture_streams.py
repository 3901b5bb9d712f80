"""Each holder of a stream for captures has one of its own, although torch hands out few in turn."""

from itertools import cycle
from weakref import WeakKeyDictionary

import pytest
import torch
from mezzo_core.ops import capture_streams
from mezzo_core.ops.capture_streams import STREAMS, capture_stream


class Stream:
    """Stands for a stream of a GPU: two objects can be the same stream.

    Weak references to it are refused; those to torch's own crash after its end.
    """

    __slots__ = ("cuda_stream",)
    turn = cycle(range(STREAMS))

    def __init__(self, device):
        self.cuda_stream = next(self.turn)

    def __eq__(self, other):
        return self.cuda_stream == other.cuda_stream

    def __hash__(self):
        return hash(self.cuda_stream)


class Holder:
    """Holds graphs that are captured on its stream."""

    def __init__(self, device):
        self.stream = capture_stream(self, torch.device(device))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_two_holders_share_a_stream_until_all_are_held(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(capture_streams, "_streams", WeakKeyDictionary())
    first = Holder(device)
    for _ in range(STREAMS):
        assert Holder(device).stream != first.stream  # and is given back at once
    held = [first, *(Holder(device) for _ in range(STREAMS - 1))]
    streams = {holder.stream.cuda_stream for holder in held}
    assert len(streams) == STREAMS
    assert Holder(device).stream.cuda_stream in streams
