"""What is built from a configuration: activations that are computed again, compiled losses."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from mezzo_core.nn import BlocksConfig, LMConfig
from mezzo_core.train import build
from mezzo_core.train.build import build_model, describe
from mezzo_core.train.distributed import World
from torch import nn
from toys.own_keys import OwnKeysConfig
from toys.retrieval import RetrievalConfig

STACKS = {"mixers": None, "block": BlocksConfig((OwnKeysConfig(),) * 2), "stack": RetrievalConfig()}
ALONE, ONE_OF_TWO = World(torch.device("cpu")), World(torch.device("cpu"), 0, 2)


@pytest.fixture(params=STACKS)
def config(request, tiny):
    stack = STACKS[request.param]
    return tiny(model=LMConfig(vocab_size=257, d_model=16, stack=stack)) if stack else tiny()


def gradients(model, loss):
    tokens = torch.randint(257, (2, 6), generator=torch.Generator().manual_seed(0))
    loss(tokens[:, :-1], tokens[:, 1:]).backward()
    return [weight.grad for weight in model.parameters()]


def test_activations_computed_again_give_the_same_gradients(config):
    found = []
    for recomputes in (False, True):
        model, loss = build_model(replace(config, activation_checkpointing=recomputes), ALONE)
        calls = []
        norm = next(part for part in model.units()[-1].modules() if isinstance(part, nn.RMSNorm))
        norm.register_forward_pre_hook(lambda *_, calls=calls: calls.append(None))
        found.append((gradients(model, loss), len(calls)))
    (wanted, once), (again, twice) = found
    assert twice == 2 * once
    torch.testing.assert_close(again, wanted, rtol=0, atol=0)


def test_they_do_so_compiled_in_one_graph(tiny):
    torch.compiler.reset()
    config = tiny()
    model, loss = build_model(replace(config, activation_checkpointing=True), ALONE)
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(model, compiled), gradients(*build_model(config, ALONE)))


def test_a_cpu_is_said_to_replay_no_graphs(tiny):
    config = tiny(cuda_graph=True)
    said = describe(config, config.model.build(), ALONE, 0)
    assert said.endswith("ops in PyTorch (their kernels need a GPU), no CUDA graphs")


@pytest.mark.parametrize("world", [ALONE, ONE_OF_TWO], ids=["alone", "one of two"])
def test_a_small_model_is_compiled_with_its_loss(tiny, monkeypatch, world):
    monkeypatch.setattr(torch, "compile", lambda function: ("compiled", function))
    model, loss = build_model(tiny(compile=True), world)
    assert loss == ("compiled", model.loss)
    assert all(unit._compiled_call_impl is None for unit in model.units())


def test_layers_of_a_large_model_share_one_compiled_graph(tiny, monkeypatch):
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    compiling = partial(torch.compile, backend=count, fullgraph=True)
    monkeypatch.setattr(torch, "compile", compiling)
    monkeypatch.setattr(build, "SMALL", 0)
    torch.compiler.reset()
    config = tiny(model=replace(tiny().model, mixers=tiny().model.mixers[:1] * 3))
    model, loss = build_model(replace(config, compile=True), ALONE)
    torch.testing.assert_close(gradients(model, loss), gradients(*build_model(config, ALONE)))
    assert len(graphs) == 1
