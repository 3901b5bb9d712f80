"""A large model compiles each kind of layer once, in a graph that torch keeps on disk."""

from dataclasses import replace
from functools import partial
from importlib import import_module

import pytest
import torch
from functorch.compile import make_boxed_func
from mezzo_core.train import build
from mezzo_core.train.build import build_model
from mezzo_core.train.distributed import World
from torch._dynamo.backends.common import aot_autograd

# A recipe, its kinds of layers, and whether its activations are computed again in the backward.
MODELS = {
    "GSA and attention": ("gsa", "tiny_gsa_attention", 2, False),
    "RAT and window": ("rat", "tiny_rat_swa", 2, False),
    "DRT: lower, encoder, upper": ("drt", "tiny_drt2", 3, False),
    "GSA, computed again": ("gsa", "tiny_gsa", 1, True),
}


@pytest.mark.parametrize(("package", "name", "kinds", "recomputes"), MODELS.values(), ids=MODELS)
def test_each_kind_of_layer_is_compiled_once_each_way(
    package, name, kinds, recomputes, monkeypatch
):
    if recomputes and torch.__version__ < "2.9":
        pytest.skip("torch 2.8 compiles each layer anew if its activations are computed again")
    config = import_module(f"mezzo_{package}.recipes").RECIPES[name]()
    compiled, targets = [], set()

    def count(way, graph, inputs):
        compiled.append(way)
        return make_boxed_func(graph)

    def compile(graph, inputs):
        targets.update(str(node.target) for node in graph.graph.nodes)
        ways = {f"{way}_compiler": partial(count, way) for way in ("fw", "bw")}
        return aot_autograd(**ways)(graph, inputs)

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compile, fullgraph=True))
    monkeypatch.setattr(build, "SMALL", 0)
    torch.compiler.reset()
    config = replace(config, compile=True, activation_checkpointing=recomputes)
    model, loss = build_model(config, World(torch.device("cpu")))
    tokens = torch.randint(200, (2, 65))
    for _ in range(2):
        loss(tokens[:, :-1], tokens[:, 1:]).backward()
    assert sorted(compiled) == ["bw"] * kinds + ["fw"] * kinds
    assert len(model.units()) > kinds
    # torch's cache on disk leaves out graphs that switch autocast.
    assert not [target for target in targets if "autocast" in target]
