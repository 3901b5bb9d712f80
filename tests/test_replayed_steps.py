"""A training step of every paper's models can be a CUDA graph: it reads no value from the GPU.

So can the check of an assistant's tokens, where the state keeps its size.
"""

import json
from contextlib import nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from mezzo_core.nn.state import grows
from mezzo_core.testing import assert_close
from mezzo_core.train.loop import train
from mezzo_drt import DRTConfig
from mezzo_drt.baselines import block_recurrent_lm, landmark_lm
from mezzo_drt.recipes import tiny
from mezzo_gsa.reproduction.mqar import PROTOCOLS
from mezzo_recurrent_transformer.reproduction.synthetic import LAYERS, SweepConfig

ROOT = Path(__file__).parents[1]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/src/*/recipes.py"))
RECIPES = {name: import_module(f"{name}.recipes").RECIPES for name in PACKAGES}
NAMES = [(p, name) for p in RECIPES for name in RECIPES[p] if name.startswith("tiny_")]
STACK = DRTConfig(num_layers=2, head_dim=16, hidden=64, chunk_size=16, window_size=32)
SIZE = replace(tiny(), d_model=32, drt=STACK)
MQAR, SYNTHETIC = PROTOCOLS["authors"], SweepConfig()
OTHERS = {
    "landmark": landmark_lm(SIZE),
    "block_recurrent": block_recurrent_lm(SIZE),
    **{f"mqar_{name}": MQAR.run(name, 64, 1e-3).model for name in MQAR.models},
    **{
        f"{task.name}_{layer}": SYNTHETIC.run(layer, task, 1e-3, 0.0, 0).model
        for layer in LAYERS
        for task in SYNTHETIC.tasks
    },
}
"""Models that have no recipe; they are trained by the scripts in experiments/."""


def recipe(package, name):
    return RECIPES[package][name]()


def build(package, name):
    """Build a recipe's model, with one layer of each kind: equal layers read the same."""
    model = recipe(package, name).model
    return replace(model, mixers=tuple(dict.fromkeys(model.mixers))).build()


@pytest.fixture
def meta(monkeypatch):
    """A device on which nothing has a value; autocast does not know it."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    with torch.device("meta"):
        yield


@pytest.mark.parametrize(("package", "name"), NAMES)
@pytest.mark.parametrize("packed", [False, True])
def test_the_tiny_models_read_no_value(package, name, packed, meta):
    tokens = torch.empty(1, 97, dtype=torch.int64)
    borders = torch.empty(4, dtype=torch.int64) if packed else None
    model = build(package, name)
    model.loss(tokens[:, :-1], tokens[:, 1:], borders).backward()


@pytest.mark.parametrize("name", OTHERS)
def test_the_experiments_models_read_no_value(name, meta):
    model, tokens = OTHERS[name].build(), torch.empty(2, 97, dtype=torch.int64)
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()


def keeps_its_size(package, name):
    with torch.device("meta"):
        return not grows(build(package, name).init_state(1))


@pytest.mark.parametrize(("package", "name"), [each for each in NAMES if keeps_its_size(*each)])
def test_what_an_assistant_proposes_is_checked_without_reading_a_value(package, name, meta):
    model, tokens = build(package, name).eval(), torch.empty(2, 32).long()
    state = model.init_state(2)
    model(tokens, state)
    model(tokens, state, lengths=torch.empty(2).long(), last_only=True)


def test_a_value_that_is_read_is_noticed(meta):
    with pytest.raises(RuntimeError, match="meta"):
        float(torch.empty(3).sum())


@pytest.mark.gpu
@pytest.mark.parametrize(("package", "name"), NAMES)
def test_losses_are_those_of_launched_steps(package, name, tmp_path):
    config = replace(recipe(package, name), steps=12, eval_batches=1, batch_size=2, compile=False)
    found = []
    for cuda_graph in (False, True):
        out = tmp_path / str(cuda_graph)
        train(replace(config, cuda_graph=cuda_graph), out, quiet=True)
        rows = map(json.loads, (out / "log.jsonl").read_text().splitlines())
        found.append([row["loss"] for row in rows if "loss" in row])
    launched, replayed = found
    # Noise in the choice of chunks may fall otherwise.
    draws = name in ("tiny_drt1", "tiny_drt2", "tiny_random")
    assert replayed == pytest.approx(launched, rel=5e-2 if draws else 1e-2)


@pytest.fixture
def nothing_compiled():
    """Forget other models: a float in which two differ becomes a tensor on the CPU.

    torch 2.11 keeps such a tensor in a CUDA graph, and its backward then reads freed memory.
    """
    torch.compiler.reset()


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("package", "name"), NAMES)
def test_graphs_that_torch_compile_makes_give_what_eager_calls_do(package, name):
    torch.manual_seed(0)
    model = build(package, name).cuda().eval()
    compiled = torch.compile(model, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.randint(64, (2, 97), device="cuda")
            found = compiled(tokens).logits.clone()  # which the next call overwrites
            assert_close("logits", found, model(tokens).logits, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.usefixtures("nothing_compiled")
@pytest.mark.parametrize(("package", "name"), NAMES)
def test_graphs_that_torch_compile_makes_have_the_gradients_of_eager_calls(package, name):
    torch.manual_seed(0)
    model = build(package, name).cuda().eval()  # so that nothing is drawn
    compiled, weights = torch.compile(model.loss, mode="reduce-overhead"), [*model.parameters()]
    for _ in range(4):
        inputs, targets = torch.randint(64, (2, 2, 97), device="cuda")
        found, truth = (
            torch.autograd.grad(loss(inputs, targets), weights, materialize_grads=True)
            for loss in (compiled, model.loss)
        )
        for grad, wanted in zip(found, truth, strict=True):
            assert_close("gradient", grad, wanted, rtol=1e-2, atol=1e-6)
