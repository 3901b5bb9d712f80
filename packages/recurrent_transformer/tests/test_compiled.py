"""What torch.compile makes of a block and a stack on a CPU."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_recurrent_transformer import RecurrentBlockConfig, RecurrentStackConfig
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._pytree import tree_leaves

C = 16
BLOCK = RecurrentBlockConfig(head_dim=8, hidden=24)
CONFIGS = {
    "block": BLOCK,
    "stack": RecurrentStackConfig(3, BLOCK),
}


@pytest.fixture(autouse=True)
def _compile_anew():
    torch._dynamo.reset()


def forms(part, num_tokens):
    """The arguments of a plain call, of a packed one, and of padded prompts of equal lengths."""
    borders = torch.tensor([0, num_tokens // 3, num_tokens])
    lengths = torch.full((2,), num_tokens - 5)
    return {
        "plain": {},
        "packed": {"cu_seqlens": borders},
        "prompts": {"state": part.init_state(2), "lengths": lengths},
    }


def results(part, call, x, form, any_length):
    """Outputs of real tokens, the state's, and gradients of x and of all weights."""
    x = x.clone().requires_grad_()
    if any_length:
        torch._dynamo.mark_dynamic(x, 1)
    y, state = call(x, **form)
    real = x.shape[1] if "lengths" not in form else int(form["lengths"][0])
    y = y[:, :real]
    held = [] if state is None else tree_leaves(state)
    held = [t[:, :real] for t in held if t.is_floating_point()]
    loss = y.square().sum() + sum(t.square().sum() for t in held)
    found = torch.autograd.grad(loss, [x, *part.parameters()])
    return [y.detach(), *(t.detach() for t in held), *found]


def check_compiled(config, backend, num_tokens, names, any_length=False):
    torch.manual_seed(0)
    part = config.build(C)
    compiled = torch.compile(part, fullgraph=True, backend=backend)
    for length in num_tokens:
        given = forms(part, length)
        for name in names:
            x = torch.randn(1 if name == "packed" else 2, length, C)
            calls = compiled, part
            found, truth = (results(part, call, x, given[name], any_length) for call in calls)
            for i, (got, wanted) in enumerate(zip(found, truth, strict=True)):
                assert_close(f"{name}, T = {length}: {i}", got, wanted, rtol=1e-5, atol=1e-6)


# Compiling in C++ is slow, so the stack stands for the block. A tile's size does not divide 37.
@pytest.mark.slow
def test_the_inductor_trains_on_every_token():
    check_compiled(CONFIGS["stack"], "inductor", [37], ["plain"], any_length=True)


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS.keys())
def test_each_form_compiles_to_one_graph_of_any_length(config):
    """Prompts after a state run every part of the backward."""
    for backend, names in (("eager", ["packed"]), ("aot_eager", ["prompts"])):
        counter = CompileCounterWithBackend(backend)
        check_compiled(config, counter, [37, 17, 50], names, any_length=True)
        assert counter.frame_count == len(names)


def test_no_graph_of_the_inductor_may_hold_the_ops():
    """They keep buffers; tests/test_replayed_steps.py sees on a GPU what comes of it."""
    ops = torch.ops.mezzo_recurrent_transformer
    for op in (ops.recurrent_layers, ops.recurrent_layers_bwd):
        assert torch.Tag.cudagraph_unsafe in op.default.tags
