"""The plan of a small call is computed once, where its tensors stay valid; what a plan may add."""

from types import SimpleNamespace

import pytest
import torch
from mezzo_rat.ops.rat_attention import chunks
from mezzo_rat.ops.rat_attention import op as registered
from mezzo_rat.ops.rat_attention.arguments import Form
from mezzo_rat.ops.rat_attention.chunks import continued_plan, kept_plan, plain_plan

FORM = Form(2, 2, False, 4, "chunk", 10_000.0, 0.25)  # W = 8 D


@pytest.fixture(autouse=True)
def forget():
    chunks._kept_plan.cache_clear()


def tensors_of(plan):
    return (plan.q_places, plan.k_places, *plan.angles)


@pytest.mark.parametrize("rope", ["chunk", "token"])
def test_a_second_call_gets_the_plan_of_the_first(rope):
    x, form = torch.zeros(1, 9, 8 * 32), FORM._replace(rope=rope)
    first, again, expected = kept_plan(x, form), kept_plan(x + 1, form), plain_plan(x, form)
    assert again is first
    assert first[:4] == expected[:4]
    for found, right in zip(tensors_of(first), tensors_of(expected), strict=True):
        assert torch.equal(found, right)


def test_another_call_gets_another_plan():
    x = torch.zeros(1, 9, 8 * 32)
    others = {
        "T": (x[:, :8], FORM),
        "B": (x.expand(2, -1, -1), FORM),
        "W": (x[..., : 8 * 16], FORM),
        "device": (x.to("meta"), FORM),
        **{
            name: (x, FORM._replace(**{name: value}))
            for name, value in {"chunk_size": 3, "rope": "token", "rope_base": 5e5}.items()
        },
    }
    plans = {"": kept_plan(x, FORM), **{name: kept_plan(*call) for name, call in others.items()}}
    assert len({id(plan) for plan in plans.values()}) == len(plans)
    assert plans["device"].q_places.is_meta


def on_gpu(stream, monkeypatch, *, capturing=False):
    """Return what a plan needs of a GPU tensor; the current stream is `stream`."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=stream)
    )
    return SimpleNamespace(is_cuda=True, device=torch.device("cpu"), shape=(1, 9, 8 * 32))


def test_a_plan_is_not_kept_in_a_cuda_graph_nor_for_another_stream(monkeypatch):
    first = kept_plan(on_gpu(1, monkeypatch), FORM)
    assert kept_plan(on_gpu(1, monkeypatch), FORM) is first
    assert kept_plan(on_gpu(2, monkeypatch), FORM) is not first
    captured = [kept_plan(on_gpu(1, monkeypatch, capturing=True), FORM) for _ in range(2)]
    assert captured[0] is not captured[1]
    assert all(plan is not first for plan in captured)


def test_no_plan_adds_more_tokens_than_there_are():
    added = torch.tensor([10, -1])
    plan = continued_plan(torch.zeros(2, 9, 8 * 32), FORM, 4, torch.zeros_like(added), added)
    assert plan.stops.tolist() == [9, 0]


def test_the_plan_of_a_long_row_is_not_kept():
    x = torch.zeros(1, 1, 1).expand(1, chunks.LONGEST_KEPT + 1, 8 * 2)
    assert kept_plan(x, FORM) is not kept_plan(x, FORM)


def test_only_eager_code_keeps_plans():
    x = torch.randn(1, 9, 8 * 32, requires_grad=True)
    run = registered.differentiable_rat_attention
    compiled = torch.compile(lambda x: run(x, None, None, *FORM)[0], backend="aot_eager")
    compiled(x).sum().backward()
    assert chunks._kept_plan.cache_info().currsize == 0
    run(x, None, None, *FORM)[0].sum().backward()
    kept = chunks._kept_plan.cache_info()
    assert (kept.misses, kept.hits) == (1, 1)  # the backward gets the forward's
