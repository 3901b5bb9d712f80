"""Training steps as CUDA graphs; without a GPU they run as they are."""

import json
from dataclasses import replace
from functools import partial
from threading import Thread

import pytest
import torch
from mezzo_core.errors import UserError
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.nn.graphs import Graphs
from mezzo_core.nn.lm import LMConfig
from mezzo_core.train.build import build_model
from mezzo_core.train.config import OptimConfig
from mezzo_core.train.distributed import World
from mezzo_core.train.loop import train
from mezzo_core.train.optim import build_optimizer, set_rate
from mezzo_core.train.replay import KEPT, WARM_UPS, Replayed
from torch import nn
from toys.echo import EchoConfig

CUDA = torch.device("cuda")


@pytest.fixture
def assert_replayed(tmp_path, rows_of):
    """Train without CUDA graphs and with them, compare the losses, and return both logs' rows."""

    def check(config, rel):
        train(config, tmp_path / "launched", quiet=True)
        train(replace(config, cuda_graph=True), tmp_path / "replayed", quiet=True)
        logs = [rows_of(tmp_path / name) for name in ("launched", "replayed")]
        launched, replayed = ([row["loss"] for row in rows] for rows in logs)
        assert replayed == pytest.approx(launched, rel=rel)
        return logs

    return check


@pytest.mark.parametrize("micro_batch_size", [None, 2])
def test_losses_do_not_depend_on_it(tiny, assert_replayed, micro_batch_size):
    config = tiny(micro_batch_size=micro_batch_size, steps=12, precision="fp32")
    norms = [[row["grad_norm"] for row in rows] for rows in assert_replayed(config, 1e-5)]
    assert norms[1] == pytest.approx(norms[0], rel=1e-4)


def test_a_run_goes_on_without_it_and_with_it(tiny, tmp_path, losses_of, train_until):
    config = tiny(steps=8, precision="fp32", checkpoint_every=2)
    train(config, tmp_path / "whole", quiet=True)
    expected = losses_of(tmp_path / "whole")
    for cuda_graph in (True, False):
        out = tmp_path / str(cuda_graph)
        train_until(replace(config, cuda_graph=cuda_graph), out, 4)
        train(replace(config, cuda_graph=not cuda_graph), out, quiet=True)
        assert losses_of(out) == pytest.approx(expected, rel=1e-5)


def test_rows_of_packed_documents_have_borders(tiny, tmp_path, assert_replayed):
    corpus = tmp_path / "documents.jsonl"
    texts = ["x" * (5 + 37 * (i % 3)) for i in range(300)]
    corpus.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    data = replace(tiny().data, source=str(corpus), mask_documents=True)
    assert_replayed(tiny(data=data, micro_batch_size=2, steps=12, precision="fp32"), 1e-5)


@pytest.mark.parametrize("captured", [False, True])
def test_the_rate_is_read_anew_at_each_step(captured):
    layer = nn.Linear(1, 1, bias=False)
    optimizer = build_optimizer(layer, OptimConfig(weight_decay=0.0), captured=captured)
    place = optimizer.param_groups[0]["lr"]
    for lr in (1e-2, 1e-3, 5e-3):
        before = layer.weight.item()
        set_rate(optimizer, lr)
        layer.weight.grad = torch.ones(1, 1)
        optimizer.step()  # moves by the rate, as all gradients are equal
        assert before - layer.weight.item() == pytest.approx(lr, rel=1e-3)
    if captured:
        assert optimizer.param_groups[0]["lr"] is place, "where a graph reads it"


def test_what_does_not_go_together_is_refused(tiny):
    with pytest.raises(UserError, match="cuda_graph and activation_checkpointing"):
        tiny(cuda_graph=True, activation_checkpointing=True)
    with pytest.raises(UserError, match="cuda_graph is for one process, and there are 2"):
        build_model(tiny(cuda_graph=True), World(torch.device("cpu"), 0, 2))


def test_without_a_gpu_work_runs_as_it_is():
    call = Replayed(lambda x, rest: (x + rest[0], x), torch.device("cpu"))
    x = torch.ones(2)
    first, second = call(x, (x, None))
    assert first.tolist() == [2, 2]
    assert second is x


@pytest.mark.gpu
def test_a_graph_reads_its_arguments_and_draws_anew():
    seen = []

    def work(x, rest):
        seen.append(x.shape)
        return x * 2 + rest[0], torch.rand(3, device=CUDA)

    call, drawn = Replayed(work, CUDA), []
    for i in range(6):
        x = torch.full((2,), float(i), device=CUDA)
        doubled, noise = call(x, (x, None))
        drawn.append(noise)
        assert doubled.tolist() == [3 * i] * 2
    assert len(seen) == WARM_UPS + 1, "then the graph is replayed"
    assert len({tuple(each.tolist()) for each in drawn}) == 6


def calling(kind, work):
    return Replayed(work, CUDA) if kind is Replayed else partial(Graphs(CUDA).run, work)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Graphs, Replayed])
def test_other_threads_may_take_memory_during_a_capture(kind):
    taken = []

    def work(x):
        thread = Thread(target=lambda: taken.append(torch.empty(2**28, device=CUDA)))
        thread.start()
        thread.join()
        return (x + 1,)

    call, x = calling(kind, work), torch.zeros(2, device=CUDA)
    for _ in range(WARM_UPS + 2):
        assert call(x)[0].tolist() == [1, 1]
    assert len(taken) == (WARM_UPS if kind is Replayed else 1) + 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Graphs, Replayed])
def test_a_busy_gpu_changes_no_random_number(kind, monkeypatch):
    """A capture resets the generator on its own stream, here half a second late."""
    begin = torch.cuda.CUDAGraph.capture_begin

    def late(graph, *args, **kwargs):
        torch.cuda._sleep(10**9)
        begin(graph, *args, **kwargs)

    def work(x):
        return (x + torch.rand(3, device=CUDA),)

    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_begin", late)
    call, x, numbers = calling(kind, work), torch.zeros(3, device=CUDA), range(WARM_UPS + 3)
    torch.manual_seed(0)
    drawn = [call(x)[0].tolist() for _ in numbers]
    torch.manual_seed(0)
    assert drawn == [torch.rand(3, device=CUDA).tolist() for _ in numbers]


@pytest.mark.gpu
def test_further_shapes_run_as_they_are():
    call = Replayed(lambda x: (x + 1,), CUDA)
    for size in range(1, KEPT + 3):
        for _ in range(WARM_UPS + 2):
            assert call(torch.zeros(size, device=CUDA))[0].tolist() == [1] * size
    assert len(call._graphs) == KEPT


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "error", "words"),
    [
        (Replayed, UserError, "cannot be captured as a CUDA graph"),
        (Graphs, RuntimeError, "captur"),
    ],
)
def test_work_that_waits_for_the_gpu_is_refused(kind, error, words):
    call, x = calling(kind, lambda x: (x * float(x.sum()),)), torch.ones(2, device=CUDA)
    for _ in range(WARM_UPS if kind is Replayed else 1):
        call(x)
    here = torch.cuda.current_stream()
    with pytest.raises(error, match=words):
        call(x)
    assert torch.cuda.current_stream() == here
    assert (x + 1).tolist() == [2, 2], "the GPU is well"


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_models_of_half_precision_are_replayed(tiny, assert_replayed, compile):
    model = replace(tiny().model, mixers=(AttentionConfig(head_dim=16, window_size=8),) * 2)
    config = tiny(model=model, steps=30, eval_every=10, compile=compile)
    _, replayed = assert_replayed(config, 1e-2)
    assert replayed[-1]["loss"] < 0.9 * replayed[0]["loss"]


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [False, True])
def test_tasks_that_tell_the_places_of_their_targets_are_replayed(tiny, assert_replayed, compile):
    model = LMConfig(vocab_size=8, d_model=32, mixers=(AttentionConfig(head_dim=16),))
    config = tiny(model=model, data=EchoConfig(), seq_len=12, steps=12, compile=compile)
    assert_replayed(config, 1e-2)
