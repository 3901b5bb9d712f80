"""ABC from raw scores: the definition, its forms, scores that write nothing, the running sum."""

import math

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_gsa.ops import ABCState, chunk_abc, recurrent_abc, step_abc_
from mezzo_gsa.ops.abc.strengths import SHORT, gates_and_strengths, running_lse
from torch._dynamo.testing import CompileCounter

READINGS = ["text", "code"]
B, T, HQ, H, K, V, M = 2, 70, 4, 2, 3, 5, 6  # more tokens than a chunk has
EMPTY = -math.inf


def normal(*shape, seed=1):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws, dtype=torch.float64)


def draw(*rows, spread=1.0):
    return {
        "q": normal(*rows, HQ, K, seed=1),
        "k": normal(*rows, H, K, seed=2),
        "v": normal(*rows, H, V, seed=3),
        "s": spread * normal(*rows, H, M, seed=4),
    }


def draw_state(rows):
    return ABCState(normal(rows, H, M, K), normal(rows, H, M, V, seed=2), normal(rows, H, M))


@pytest.mark.parametrize("scale", [1.0, K**-0.5])
@pytest.mark.parametrize("reading", READINGS)
def test_it_is_the_papers_sum_or_the_average_that_its_program_keeps(reading, scale):
    """Equation 4's weights written out, for each token anew: no recurrence, no logarithms."""
    x = draw(1, 9)
    q, k, v, alpha = x["q"][0], x["k"][0], x["v"][0], x["s"][0].exp()
    outs = []
    for t in range(1, 10):
        total = alpha[:t].cumsum(0) if reading == "text" else alpha[:t].sum(0)
        share = alpha[:t] / total
        slots_k, slots_v = (torch.einsum("thm,thd->hmd", share, y[:t]) for y in (k, v))
        groups = q[t - 1].view(H, HQ // H, K)
        p = torch.einsum("hmk,hgk->hgm", slots_k, scale * groups).softmax(-1)
        outs.append(torch.einsum("hgm,hmv->hgv", p, slots_v).flatten(0, 1))
    for op in (recurrent_abc, chunk_abc):
        out, state = op(**x, reading=reading, scale=scale)
        assert_close(op.__name__, out[0], torch.stack(outs), rtol=1e-10)
        assert_close("state.k", state.k[0], slots_k, rtol=1e-10)
        assert_close("state.v", state.v[0], slots_v, rtol=1e-10)
        assert_close("state.z", state.z[0], alpha.sum(0).log(), rtol=1e-10)


def gradients(op, x, state, **form):
    leaves = [y.clone().requires_grad_() for y in (*x.values(), *state)]
    first = ABCState(*leaves[4:])
    out, last = op(**dict(zip(x, leaves, strict=False)), initial_state=first, **form)
    results = [out, *last]
    loss = sum((y * normal(*y.shape)).sum() for y in results)
    return [*results, *torch.autograd.grad(loss, leaves)]


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("borders", [None, [0, 3, 3, T], [0, 0, T, T]])
def test_chunks_equal_the_definition_with_all_gradients(reading, borders):
    x = draw(B if borders is None else 1, T, spread=5.0)
    state = draw_state(B if borders is None else 3)
    cu_seqlens = None if borders is None else torch.tensor(borders)
    form = {"reading": reading, "scale": 0.5, "cu_seqlens": cu_seqlens}
    found, expected = (gradients(op, x, state, **form) for op in (chunk_abc, recurrent_abc))
    for i, (ours, truth) in enumerate(zip(found, expected, strict=True)):
        assert_close(f"result {i}", ours, truth, rtol=1e-8)


@pytest.mark.parametrize("reading", READINGS)
def test_packed_sequences_start_from_nothing_and_no_tokens_leave_nothing(reading):
    x, borders = draw(1, 5), torch.tensor([0, 0, 2, 5])
    out, state = chunk_abc(**x, reading=reading, cu_seqlens=borders)
    for i, (a, b) in enumerate([(0, 0), (0, 2), (2, 5)]):
        alone = {name: part[:, a:b] for name, part in x.items()}
        own, last = chunk_abc(**alone, reading=reading)
        torch.testing.assert_close(out[:, a:b], own)
        for ours, theirs in zip(state, last, strict=True):
            torch.testing.assert_close(ours[i : i + 1], theirs)
    assert (state.z[0] == EMPTY).all()


@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("start", ["empty", "drawn"])
def test_steps_overwrite_the_state_with_that_of_the_definition(reading, start):
    x, form = draw(B, 4), {"reading": reading, "scale": 0.5}
    state = draw_state(B)
    if start == "empty":
        state = ABCState(state.k * 0, state.v * 0, torch.full_like(state.z, EMPTY))
    whole, last = recurrent_abc(**x, initial_state=state, **form)
    places = [part.data_ptr() for part in state]
    with torch.no_grad():
        outs = [
            step_abc_(**{n: y[:, t] for n, y in x.items()}, state=state, **form) for t in range(4)
        ]
    assert_close("out", torch.stack(outs, 1), whole, rtol=1e-10)
    for ours, theirs, place in zip(state, last, places, strict=True):
        assert_close("state", ours, theirs, rtol=1e-10)
        assert ours.data_ptr() == place


@pytest.mark.any_shapes
@pytest.mark.parametrize("op", [recurrent_abc, chunk_abc])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"reading": "book"}, ValueError, 'reading must be "text" or "code", got \'book\''),
        ({"s": normal(B, T, H)}, ValueError, r"s must be \(2, 70, 2, M\)"),
        ({"s": normal(B, T, H, M).int()}, TypeError, "s must be floating-point"),
        ({"s": None}, TypeError, "s must be a tensor, got NoneType"),
        ({"initial_state": (0, 0, 0)}, TypeError, "initial_state must be an ABCState, got tuple"),
        (
            {"initial_state": draw_state(B)._replace(z=normal(B, H, M, 1))},
            ValueError,
            r"initial_state\.z must be \(2, 2, 6\) on cpu, got \(2, 2, 6, 1\)",
        ),
        ({"initial_state": draw_state(3)}, ValueError, r"initial_state\.k must be \(2, 2, 6, 3\)"),
    ],
)
def test_bad_arguments_are_named(op, change, error, message):
    with pytest.raises(error, match=f"{op.__name__}: {message}"):
        op(**{**draw(B, T), **change})


@pytest.mark.parametrize("op", [recurrent_abc, chunk_abc])
def test_borders_that_do_not_hold_all_tokens_are_refused(op):
    with pytest.raises(ValueError, match=f"{op.__name__}: cu_seqlens must .*end at T = 5, got"):
        op(**draw(1, 5), cu_seqlens=torch.tensor([0, 4]))


@pytest.mark.parametrize("op", [recurrent_abc, chunk_abc])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_scores_and_a_state_may_have_another_dtype(op, dtype):
    x = {name: part.float() for name, part in draw(B, 4).items()}
    x["s"], first = x["s"].to(dtype), ABCState(*(part.to(dtype) for part in draw_state(B)))
    out, last = op(**x, initial_state=first)
    x["s"], first = x["s"].float(), ABCState(*(part.float() for part in first))
    wanted, after = op(**x, initial_state=first)
    assert all(map(torch.equal, (out, *last), (wanted, *after)))
    assert {part.dtype for part in (out, *last)} == {torch.float32}
    low = op(**{name: part.half() for name, part in x.items()})
    assert (low.out.dtype, low.final_state.k.dtype) == (torch.float16, torch.float32)


@pytest.mark.any_shapes
@pytest.mark.parametrize(("name", "value"), [("reading", "book"), ("impl", "fast")])
@torch.no_grad()
def test_options_of_a_step_that_are_none_are_named(name, value):
    with pytest.raises(ValueError, match=f"{name} must be .*, got '{value}'"):
        step_abc_(**draw(B), state=draw_state(B), **{name: value})


def test_a_step_needs_a_state_of_its_precision():
    x, state = draw(B), draw_state(B)
    with torch.no_grad(), pytest.raises(TypeError, match=r"step_abc_: state\.z must be .*float64"):
        step_abc_(**x, state=state._replace(z=state.z.float()))
    x["s"].requires_grad_()
    with pytest.raises(RuntimeError, match="step_abc_ overwrites the state"):
        step_abc_(**x, state=state)


@pytest.mark.parametrize("op", [recurrent_abc, chunk_abc])
@pytest.mark.parametrize("reading", READINGS)
@pytest.mark.parametrize("silent", [slice(0, 2), slice(3, 5), slice(0, 6)])
def test_scores_of_minus_infinity_write_nothing(op, reading, silent):
    x = draw(1, 6)
    x["s"][:, silent] = EMPTY
    x["s"].requires_grad_()
    out, state = op(**x, reading=reading)
    speaking = [t for t in range(6) if t not in range(6)[silent]]
    spoken = {name: y[:, speaking] for name, y in x.items()}
    own, last = op(**spoken, reading=reading)
    torch.testing.assert_close(out[:, speaking], own)
    for ours, theirs in zip(state, last, strict=True):
        torch.testing.assert_close(ours, theirs)
    loss = out.sum() + state.k.sum() + state.v.sum()
    (ds,) = torch.autograd.grad(loss, x["s"])
    assert ds.isfinite().all()
    assert not ds[:, silent].any()
    begun = draw_state(1)._replace(z=torch.full((1, H, M), EMPTY, dtype=torch.float64))
    begun.z.requires_grad_()
    (dz,) = torch.autograd.grad(op(**x, initial_state=begun, reading=reading)[1].k.sum(), begun.z)
    assert not dz.any(), "an empty state, where perhaps nothing is written either"
    after = [part.clone() for part in state]
    quiet = {name: y[:, 0].detach() for name, y in x.items()} | {"s": torch.full((1, H, M), EMPTY)}
    with torch.no_grad():
        step_abc_(**quiet, state=ABCState(*(part.detach() for part in state)), reading=reading)
    for ours, theirs in zip(state, after, strict=True):
        assert torch.equal(ours, theirs)


def lse_loop(logits, z0):
    before, after, z = [], [], z0
    for t in range(logits.shape[1]):
        before.append(z)
        z = torch.logaddexp(z, logits[:, t])
        after.append(z)
    return torch.stack(before, 1), torch.stack(after, 1)


@pytest.mark.parametrize("T", [1, 2, 33])
@pytest.mark.parametrize("spread", [1.0, 100.0])
def test_the_running_sum_continues_and_equals_a_loop(T, spread):
    torch.manual_seed(0)
    logits = spread * torch.randn(2, T, 3, dtype=torch.float64)
    logits[:, 0, 0] = -1e30  # as some masks write it
    logits.requires_grad_()
    z0 = torch.tensor([[float("-inf")] * 3, [0.5, -200.0, 200.0]], dtype=torch.float64)
    weights = torch.randn(2, T, 3, dtype=torch.float64)
    before, z, last = running_lse(logits, z0)
    loop_before, loop_z = lse_loop(logits, z0)
    assert_close("before", before.detach(), loop_before.detach(), rtol=1e-12)
    assert_close("z", z, loop_z, rtol=1e-12)
    assert torch.equal(last, z[:, -1])
    (d,), (loop_d,) = (torch.autograd.grad(out, logits, weights) for out in (z, loop_z))
    assert_close("dlogits", d, loop_d, rtol=1e-10)


@pytest.mark.parametrize(
    "lengths", [[40], [1, 0, 1, 7, 0, 0, 31], [0, 16, 17], [3, 3, 3], [200, 30]]
)
def test_the_running_sum_begins_anew_at_each_border(lengths):
    torch.manual_seed(0)
    logits = (30 * torch.randn(1, sum(lengths), 2, 3, dtype=torch.float64)).requires_grad_()
    borders = torch.tensor([0, *lengths]).cumsum(0)
    z0 = torch.randn(len(lengths), 2, 3, dtype=torch.float64)
    z0[0] = EMPTY
    weights = torch.randn_like(logits)
    before, z, last = running_lse(logits, z0, borders)
    parts = zip(logits.split(lengths, 1), z0.split(1), strict=True)
    pieces = [lse_loop(part, first) for part, first in parts if part.shape[1]]
    loop_before, loop_z = (torch.cat(side, 1) for side in zip(*pieces, strict=True))
    assert_close("before", before.detach(), loop_before.detach(), rtol=1e-12)
    assert_close("z", z, loop_z, rtol=1e-12)
    ends = zip(borders.tolist(), borders[1:].tolist(), z0, strict=False)
    expected = [z[0, end - 1] if end > start else first for start, end, first in ends]
    assert torch.equal(last, torch.stack(expected))
    (d,), (loop_d,) = (torch.autograd.grad(out, logits, weights) for out in (z, loop_z))
    assert_close("dlogits", d, loop_d, rtol=1e-10)


def test_short_packed_rows_share_a_compiled_graph():
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(running_lse, backend=counter, fullgraph=True, dynamic=True)
    for T, graphs in ((5, 1), (100, 1), (SHORT, 1), (SHORT + 1, 2)):
        arguments = normal(1, T, 3), normal(2, 3), torch.tensor([0, 3, T])
        for found, expected in zip(compiled(*arguments), running_lse(*arguments), strict=True):
            assert torch.equal(found, expected)
        assert counter.frame_count == graphs


def test_late_tokens_of_an_average_write_their_exact_share():
    """With equal logits token t writes 1/t: the difference of the two sums would lose that."""
    scores = torch.full((1, 5000, 1, 2), 3.0)
    before, z, _ = running_lse(scores, torch.full((1, 1, 2), EMPTY))
    g, s = gates_and_strengths(scores, before, z, "code")
    assert s is None
    share = -torch.expm1(g.double())[0, :, 0, 0]
    torch.testing.assert_close(share, 1 / torch.arange(1.0, 5001).double(), rtol=5e-6, atol=0)
