"""torch.compile on a CPU, with its inductor, is right to the last token."""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_rat import LinearRNNConfig, RATConfig, RATReversedConfig
from mezzo_rat.ops.rat_attention.chunks import continued_chunks, packed_chunks, plain_chunks
from torch._dynamo.testing import CompileCounterWithBackend

C, L = 16, 16
CONFIGS = [
    RATConfig(L, head_dim=8),
    LinearRNNConfig(span=8),
    RATReversedConfig(L, head_dim=8, gate_rank=3, span=4),
]


@pytest.fixture(autouse=True)
def _compile_anew():
    torch._dynamo.reset()


def forms(mixer, num_tokens):
    """The arguments of a plain call, of a packed one, and of a padded prompt."""
    borders = torch.tensor([0, num_tokens // 3, num_tokens])
    lengths = torch.tensor([num_tokens - 5])
    return {
        "plain": {},
        "packed": {"cu_seqlens": borders},
        "prompts": {"state": mixer.init_state(1), "lengths": lengths},
    }


def results(mixer, call, x, form, any_length):
    """Outputs of real tokens, the state, and gradients of x and of all weights."""
    x = x.clone().requires_grad_()
    if any_length:
        torch._dynamo.mark_dynamic(x, 1)
    y, state = call(x, **form)
    if "lengths" in form:
        y = y[:, : int(form["lengths"][0])]
    held = [] if state is None else [part for part in state if part.is_floating_point()]
    loss = y.square().sum() + sum(part.square().sum() for part in held)
    found = torch.autograd.grad(loss, [x, *mixer.parameters()])
    return [y.detach(), *(part.detach() for part in held), *found]


def check_compiled(config, backend, num_tokens, names, any_length=False):
    torch.manual_seed(0)
    mixer = config.build(C)
    compiled = torch.compile(mixer, fullgraph=True, backend=backend)
    for length in num_tokens:
        x, given = torch.randn(1, length, C), forms(mixer, length)
        for name in names:
            calls = compiled, mixer
            found, truth = (results(mixer, call, x, given[name], any_length) for call in calls)
            for i, (got, wanted) in enumerate(zip(found, truth, strict=True)):
                assert_close(f"{name}, T = {length}: {i}", got, wanted, rtol=1e-5, atol=1e-6)


def test_the_inductor_finds_the_chunk_of_every_token():
    borders, start, added = torch.tensor([0, 30, 100]), torch.tensor([7, 20]), torch.tensor([80, 9])

    def chunks(x):
        T = x.shape[1]
        return [
            plain_chunks(T, L, x.device),
            packed_chunks(T, L, borders),
            continued_chunks(T, L, 9, start, added),
        ]

    x = torch.zeros(1, 100)
    for got, expected in zip(torch.compile(chunks)(x), chunks(x), strict=True):
        for name, value in expected._asdict().items():
            assert value is None or torch.equal(getattr(got, name), value), name


# Compiling in C++ is slow, so RAT, which has every part of the other two, stands for them. At 16
# tokens a chunk the inductor splits a loop.
@pytest.mark.slow
def test_the_inductor_trains_on_every_token():
    check_compiled(CONFIGS[0], "inductor", [100], ["plain"])


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: type(config).__name__)
def test_each_form_compiles_to_one_graph_of_any_length(config):
    """Prompts after a state run every part of the backward."""
    for backend, names in (("eager", ["plain", "packed"]), ("aot_eager", ["prompts"])):
        counter = CompileCounterWithBackend(backend)
        check_compiled(config, counter, [100, 17, 194], names, any_length=True)
        assert counter.frame_count == len(names)
