"""Memory and CUDA graphs that the op keeps: on a CPU, which pretends to capture and to replay."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from mezzo_recurrent_transformer.ops.recurrent_layers import (
    LayerWeights,
    eager,
    graphs,
    op,
    workspace,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.backward import Kept, backward
from mezzo_recurrent_transformer.ops.recurrent_layers.form import Form
from mezzo_recurrent_transformer.ops.recurrent_layers.forward import forward
from mezzo_recurrent_transformer.ops.recurrent_layers.operands import (
    BackwardBuffers,
    ForwardBuffers,
    Matrices,
)
from mezzo_recurrent_transformer.ops.recurrent_layers.workspace import (
    Call,
    backward_workspace,
    forward_workspace,
    workspace_for,
)
from torch.utils._pytree import tree_leaves

from .problems import problem

pytest.importorskip("triton")


def tiny(n=2, rows=3, T=39, dtype=torch.float32, impl="eager", seed=0, **of_form):
    """Return x, what its gradients are pulled by, and what a call computes with."""
    case = rows, T, {}
    inputs, options, (dz,) = problem(case, n, 2, 16, 96, dtype=torch.float32, seed=seed)
    x = inputs.pop("x")
    matrices = Matrices.of(LayerWeights(**inputs), dtype)
    form = Form(2, 1.0, "rms", 1e-5, True, 1)._replace(**of_form)
    return x, dz, Call(matrices, options["alibi_slopes"] + seed, None, form, op.parts_of(impl))


class Replayed:
    """Stands for a CUDA graph, which a CPU lacks."""

    def __init__(self, call):
        self.replay = call


class OnAGPU(torch.Tensor):
    """A CPU tensor that claims to be on a GPU."""

    is_cuda = True


def capture(call, side, pool=None):
    """Stand for `graphs.capture`: a whole call, which has no pool, has results in fixed memory."""
    if pool is not None:
        return Replayed(call), None
    results = call()

    def replay():
        for kept, new in zip(results, call(), strict=True):
            if kept is not None:
                kept.copy_(new)

    return Replayed(replay), results


@pytest.fixture
def replaying(monkeypatch):
    """Let a CPU pretend to capture graphs and to replay them."""
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "capture_stream", lambda holder: object())
    for module, name in ((workspace, "_kept"), (graphs, "_counts"), (graphs, "_captured")):
        monkeypatch.setattr(module, name, graphs.Latest())
    on_a_stream(monkeypatch)


def on_a_stream(monkeypatch, stream=0, capturing=False):
    current = SimpleNamespace(cuda_stream=stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)


def test_what_is_kept_in_inference_mode_can_be_overwritten_outside_of_it(monkeypatch):
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(graphs, "capture", capture)
    monkeypatch.setattr(graphs, "capture_stream", lambda holder: object())
    x, _, call = tiny()
    call.weights.map(lambda w: w.requires_grad_())
    with torch.inference_mode():
        of_forward = forward_workspace(x, 16, call)
        kept = [of_forward, backward_workspace(x, of_forward)]
        captured = graphs._Captured(lambda *given: given, [x, None, call.weights.n1])
    kept = tree_leaves(([(work.buffers, work.w, work.slopes) for work in kept], captured.arguments))
    assert not any(t.is_inference() or t.requires_grad for t in kept if t is not None)


@pytest.mark.parametrize(
    "change",
    [
        *({"n": 3}, {"rows": 2}, {"dtype": torch.bfloat16}, {"impl": "triton"}, {"eps": 1e-3}),
        *({"S": 32}, {"of_x": torch.bfloat16}, {"of_x": "meta"}, {"stream": 1}, {"precision": 1}),
    ],
    ids=str,
)
def test_each_kind_of_call_has_a_workspace_of_its_own(change, replaying, monkeypatch):
    def take(S=16, of_x=torch.float32, stream=0, precision=0, **of_call):
        x, _, call = tiny(**of_call)
        on_a_stream(monkeypatch, stream)
        monkeypatch.setattr(workspace, "product_settings", lambda: precision)
        return workspace_for(ForwardBuffers, x.to(of_x).as_subclass(OnAGPU), S, call)

    works = [take(**its) for its in ({}, change, {}, change)]
    first, second, *again = [work.buffers.stream.data_ptr() for work in works]
    assert first != second
    assert again == [first, second]


def test_a_call_that_is_captured_has_memory_of_its_own(replaying, monkeypatch):
    on_a_stream(monkeypatch, capturing=True)
    x, _, call = tiny()
    assert workspace_for(ForwardBuffers, x.as_subclass(OnAGPU), 16, call).graphs is None
    assert not workspace._kept


def test_a_backward_in_the_memory_of_its_forward_gives_the_same(replaying):
    inputs, dz, call = tiny()

    def run(x):
        stream = forward(x, call).stream
        found = backward(dz, None, Kept(stream[:, :, : x.shape[1]], None), call)
        return stream, found.x, *found.weights

    wanted = run(inputs)
    for _ in range(2):  # the second time steps are replayed
        for found, plain in zip(run(inputs.as_subclass(OnAGPU)), wanted, strict=True):
            assert torch.equal(found, plain)
    buffers = [work.buffers for work in workspace._kept.values()]
    of_forward, of_backward = sorted(buffers, key=lambda each: isinstance(each, BackwardBuffers))
    assert of_backward.z.data_ptr() == of_forward.stream[1].data_ptr()


def test_whole_calls_are_replayed_with_all_that_they_are_given(replaying, monkeypatch):
    """With other weights and slopes each time; two forms and two implementations by turns."""
    others = type("Parts", (), {name: staticmethod(vars(eager)[name]) for name in eager.__all__})
    monkeypatch.setattr(graphs, "REPEATED", 1)
    for seed in range(2):
        for parts, eps in ((eager, 1e-5), (eager, 0.1), (others, 1e-5)):
            x, dz, call = tiny(rows=1, T=2, seed=seed, eps=eps)
            call = call._replace(parts=parts)

            def run(x, dz, call=call):
                stream = op._forward(x, call).stream
                found = op._backward(dz, None, Kept(stream[:, :, : x.shape[1]], None), call)
                return stream, found.x, *found.weights

            replayed = run(x.as_subclass(OnAGPU), dz.as_subclass(OnAGPU))
            for found, plain in zip(replayed, run(x, dz), strict=True):
                assert torch.equal(found, plain)
    assert len({each.stream for each in graphs._captured.values()}) == 6


def test_graphs_of_a_workspace_and_no_others_share_a_stream(replaying, monkeypatch):
    sides = []
    monkeypatch.setattr(
        graphs, "capture", lambda call, side, pool: (Replayed(call), sides.append(side))
    )
    for rows in (3, 2):
        x, _, call = tiny(rows=rows)
        forward(x.as_subclass(OnAGPU), call)
    owners = [work.graphs for work in workspace._kept.values()]
    assert sides == [owner.stream for owner in owners for _ in owner.graphs]
    assert len({*sides}) == 2 < len(sides)


def test_memory_that_torch_keeps_unused_is_freed_where_a_capture_lacks_it(monkeypatch):
    calls = []

    class Graph:
        capture_begin = capture_end = lambda *given, **options: None

    def run():
        calls.append("run")
        if "freed" not in calls:
            raise torch.OutOfMemoryError
        return "found"

    here = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda side: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("freed"))
    assert graphs.capture(run, here)[1] == "found"
    assert calls == ["run", "freed", "run"]


def test_each_kind_of_whole_call_is_captured_alone_and_its_results_stay(replaying, monkeypatch):
    usual = {"key": "one", "x": torch.arange(6.0), "stream": 0, "precision": 0}
    changes = ({"key": "two"}, {"x": usual["x"].double()}, {"x": usual["x"][:3]}, {"stream": 1})
    kinds = [usual | change for change in ({}, *changes, {"precision": 1})]
    uncaptured = [usual | {"capturing": True}, usual | {"size": graphs.LARGEST + 1}]
    results = []
    for turn in range(graphs.REPEATED + 2):
        for i, kind in enumerate(kinds + uncaptured):
            on_a_stream(monkeypatch, kind["stream"], kind.get("capturing", False))
            monkeypatch.setattr(graphs, "product_settings", lambda kind=kind: kind["precision"])
            x = (kind["x"] + turn).as_subclass(OnAGPU)
            call = lambda x, none, i=i: (x * i, none)  # noqa: E731
            found, _ = graphs.run(call, (x, None), kind["key"], kind.get("size", 0))
            results.append((found, i * (kind["x"] + turn)))
        assert len(graphs._captured) == (len(kinds) if turn + 1 >= graphs.REPEATED else 0)
    for found, wanted in results:
        assert torch.equal(found, wanted)


def test_what_was_used_last_is_kept():
    latest = graphs.Latest()
    for key in (*range(graphs.KEPT), 0, graphs.KEPT):
        assert latest.take(key, lambda key=key: key) == key
    assert list(latest) == [*range(2, graphs.KEPT), 0, graphs.KEPT]
