"""Tables that are made once: on a GPU, other streams and captured graphs read them too."""

from threading import get_ident
from types import SimpleNamespace

import pytest
import torch
from mezzo_core.ops.tables import kept


def test_a_table_is_computed_before_it_is_kept_and_a_capture_keeps_none(monkeypatch):
    events, capturing = [], [True]
    gpu = SimpleNamespace(is_cuda=True, device="cuda:0")  # in place of a tensor on it
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    stream = SimpleNamespace(synchronize=lambda: events.append("waited"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    table = kept(lambda size, *, device: (events.append(size), (gpu, gpu))[1])
    table(3, device="cuda:0"), table(3, device="cuda:0")
    assert events == [3, 3], "there are no values before the replay"
    capturing[0] = False
    first = table(3, device="cuda:0")
    assert events[2:] == [3, "waited"]
    capturing[0] = True
    assert table(3, device="cuda:0") is first
    assert table(4, device="cuda:0") is not first
    assert events[4:] == [4]


def test_a_table_is_made_where_no_other_rules_for_memory_hold():
    threads = []
    table = kept(lambda size, *, device: (threads.append(get_ident()), torch.zeros(size))[1])
    with torch.inference_mode():
        first = table(3, device="cpu")
    assert not first.is_inference()
    assert threads != [get_ident()]


@pytest.mark.gpu
def test_a_graph_that_torch_compile_makes_does_not_own_a_table():
    table = kept(lambda size, *, device: torch.arange(size, device=device))

    @torch.library.custom_op("mezzo_tests::add_table", mutates_args=())
    def add(x: torch.Tensor) -> torch.Tensor:
        return x + table(x.shape[0], device=x.device)

    add.register_fake(torch.empty_like)
    compiled = torch.compile(add, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(8, device="cuda")
        torch.testing.assert_close(compiled(x).clone(), x + torch.arange(8, device="cuda"))
