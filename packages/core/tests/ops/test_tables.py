"""Tables that are made once: on a GPU, other streams and captured graphs read them too."""

from types import SimpleNamespace

import torch
from mezzo_core.ops.tables import kept


def test_a_table_is_computed_before_it_is_kept_and_a_capture_keeps_none(monkeypatch):
    events, capturing = [], [True]
    gpu = SimpleNamespace(is_cuda=True, device="cuda:0")  # in place of a tensor on it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    stream = SimpleNamespace(synchronize=lambda: events.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    table = kept(lambda size, *, base=1.0: (events.append((size, base)), (gpu, gpu))[1])
    table(3), table(3)
    assert events == [(3, 1.0)] * 2, "there are no values before the replay"
    capturing[0] = False
    first = table(3)
    assert events[2:] == [(3, 1.0), "waited"]
    capturing[0] = True
    assert table(3) is first
    assert table(4, base=2.0) is not first
    assert events[4:] == [(4, 2.0)]
