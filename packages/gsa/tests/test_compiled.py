"""Mixers compiled by the inductor for a CPU equal themselves, at lengths that fill no chunk."""

from functools import partial

import pytest
import torch
from mezzo_core.nn import init_weights
from mezzo_gsa.abc import ABCConfig
from mezzo_gsa.gated_abc import GatedABCConfig
from mezzo_gsa.gla import GLAConfig
from mezzo_gsa.gsa import GSA, GSAConfig
from mezzo_gsa.hgrn2 import HGRN2Config
from mezzo_gsa.mamba import MambaConfig
from mezzo_gsa.ops.gla import chunk_gla, recurrent_gla
from mezzo_gsa.ops.gsa import GSAState, chunk_gsa, recurrent_gsa
from mezzo_gsa.retnet import RetNet, RetNetConfig
from torch._dynamo.testing import CompileCounterWithBackend

C = 16
CONFIGS = {
    "gsa": GSAConfig(2, num_slots=4),
    "abc": ABCConfig(2, num_slots=4),
    "gated abc": GatedABCConfig(2, num_slots=4),  # by the other reading
    "gla": GLAConfig(2),
    "hgrn2": HGRN2Config(8),
    "retnet": RetNetConfig(2),
    "mamba": MambaConfig(state_size=4),
}


def normal(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.fixture(params=CONFIGS)
def mixer(request):
    torch._dynamo.reset()
    torch.manual_seed(0)
    mixer = CONFIGS[request.param].build(C)
    init_weights(mixer, 0.5)
    return mixer


def packed(mixer, x, borders, state, lengths):
    return [mixer(x[:1], cu_seqlens=borders)[0]]


def padded(mixer, x, borders, state, lengths):
    """Padding after a state, which has every part of a plain call."""
    y, after = mixer(x, state, lengths=lengths)
    return [y, *after]


def results_and_gradients(outputs, mixer, T):
    x = normal(2, T, C).requires_grad_()
    torch._dynamo.mark_dynamic(x, 1)
    borders, lengths = torch.tensor([0, 5, 5, T]), torch.tensor([T - 3, 0])
    results = outputs(x, borders, mixer.init_state(2), lengths)
    loss = sum((y * normal(*y.shape)).sum() for y in results if y.is_floating_point())
    weights = dict(mixer.named_parameters())
    found = torch.autograd.grad(loss, [x, *weights.values()])
    return [*enumerate(results), *zip(["x", *weights], found, strict=True)]


def check_one_graph(mixer, form, backend):
    """Assert that a form is one graph and equals eager, at lengths that fill no chunk."""
    outputs = partial(form, mixer)
    backend = CompileCounterWithBackend(backend)
    compiled = torch.compile(outputs, fullgraph=True, backend=backend)
    for T in (100, 17, 33):
        pairs = [results_and_gradients(f, mixer, T) for f in (compiled, outputs)]
        for (name, found), (_, truth) in zip(*pairs, strict=True):
            torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4, msg=f"{name} at {T}")

    assert backend.frame_count == 1


# The inductor compiles the code around the op, and a loop in C++ takes it seconds. So GSA stands
# for the gates, slots and norms of all; RetNet alone rotates by places in packed sequences.
@pytest.mark.slow
@pytest.mark.parametrize("mixer", ["gsa", "retnet"], indirect=True)
def test_the_inductor_gives_what_eager_gives_at_any_length(mixer):
    check_one_graph(mixer, packed if isinstance(mixer, RetNet) else padded, "inductor")


def test_all_forms_compile_in_one_graph(mixer):
    """Padding after a state runs every part of the backward; the inductor has the other two."""
    if not isinstance(mixer, RetNet):
        check_one_graph(mixer, packed, "eager")
    if not isinstance(mixer, GSA):
        check_one_graph(mixer, padded, "aot_eager")


def test_decoding_compiles_in_one_graph(mixer):
    step = torch.compile(mixer.step, fullgraph=True, backend="aot_eager")
    x = normal(2, 3, C)
    ours, state = mixer.init_state(2), mixer.init_state(2)
    with torch.no_grad():
        for t in range(3):
            found, expected = step(x[:, t : t + 1], ours), mixer.step(x[:, t : t + 1], state)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    for found, expected in zip(ours, state, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


FORMS = [chunk_gsa, recurrent_gsa, chunk_gla, recurrent_gla]


def draw(op, rows, T, states):
    inputs = [normal(rows, T, 4, 3), normal(rows, T, 2, 3), normal(rows, T, 2, 5)]
    if op in (chunk_gla, recurrent_gla):
        return [*inputs, -normal(rows, T, 2, 3).abs()], [normal(states, 2, 3, 5)]
    inputs += [-normal(rows, T, 2, 6).abs(), normal(rows, T, 2, 6)]
    return inputs, [normal(states, 2, 6, 3), normal(states, 2, 6, 5)]


@pytest.mark.parametrize("op", FORMS)
def test_the_ops_of_compiled_graphs_keep_their_contract(op):
    inputs, states = draw(op, 1, 7, 2)
    rest = (torch.tensor([0, 3, 7]), 0.5, "softmax" if op in (chunk_gsa, recurrent_gsa) else "")
    forward, backward = (
        getattr(torch.ops.mezzo_gsa, f"{op.__name__}_eager{end}").default for end in ("", "_bwd")
    )
    results = forward(inputs, states, *rest)
    fakes = ("test_schema", "test_faketensor")  # AOTAutograd traces it with the forward
    torch.library.opcheck(backward, (results, inputs, states, *rest), test_utils=fakes)
    none = [None, *results[1:]]
    torch.library.opcheck(backward, (none, inputs, states, *rest), test_utils=fakes)
    leaves = [[x.requires_grad_() for x in part] for part in (inputs, states)]
    torch.library.opcheck(forward, (*leaves, *rest))


@pytest.mark.parametrize("op", FORMS)
@pytest.mark.parametrize("T", [0, 1, 70])
def test_the_ops_of_compiled_graphs_equal_eager(op, T):
    torch._dynamo.reset()
    inputs, states = draw(op, 2, T, 2)
    leaves = [x.requires_grad_() for x in (*inputs, *states)]

    def results_and_gradients(function):
        state = states[0] if len(states) == 1 else GSAState(*states)
        out, last = function(*inputs, scale=0.5, initial_state=state)
        results = [out, *(last if isinstance(last, tuple) else (last,))]
        total = sum((y * normal(*y.shape)).sum() for y in results)
        return [*results, *torch.autograd.grad(total, leaves)]

    compiled = torch.compile(op, fullgraph=True, backend="aot_eager")
    found, expected = results_and_gradients(compiled), results_and_gradients(op)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_borders_are_checked_in_compiled_graphs_too():
    torch._dynamo.reset()
    inputs, _ = draw(chunk_gla, 1, 7, 1)
    compiled = torch.compile(chunk_gla, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=r"chunk_gla: cu_seqlens must .* end at T = 7, got"):
        compiled(*inputs, cu_seqlens=torch.tensor([0, 3, 6]))
