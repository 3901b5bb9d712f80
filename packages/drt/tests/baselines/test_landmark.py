"""Landmark attention is its definition in both forms, and a stack that keeps the contract."""

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from mezzo_core.nn.lm import LMConfig
from mezzo_core.positions import rotate
from mezzo_core.testing.arguments import check_fields, check_module_arguments
from mezzo_core.testing.laws import LAWS
from mezzo_core.testing.numerics import assert_close
from mezzo_drt.baselines import LandmarkConfig
from mezzo_drt.baselines.landmark.attention import PREFERENCE, Places, Reach, dense, gathered
from torch import nn
from torch.utils.checkpoint import checkpoint

L, D, BASE = 4, 6, 100.0
C = 12


def by_hand(q, k, v, n, o, first, reach):
    """Attend from one query of one head, q (D,), to chunks k, v (N, P, D), place by place.

    Keys are not rotated here: query and key are turned by the places between them.
    """
    P = k.shape[1]

    def logit(j, place):
        distance = min(n - j, reach.furthest) * P + o - place
        at = torch.tensor([[distance, 0]])
        turned = rotate(torch.stack([q, k[j, place]])[None, :, None], at, reach.rope_base)
        return float(turned[0, 0, 0] @ turned[0, 1, 0]) / math.sqrt(len(q))

    local = [j for j in range(first, n) if j >= n - reach.local]
    older = [j for j in range(first, n) if j < n - reach.local]
    older.sort(key=lambda j: PREFERENCE * (n - j) - logit(j, P - 1))
    seen = local + older[: reach.retrieved]
    own = {(n, i): math.exp(logit(n, i)) for i in range(min(o, P - 2) + 1)}
    gates = {j: math.exp(logit(j, P - 1)) for j in seen}
    total = sum(own.values()) + sum(gates.values())
    out = sum(w / total * v[n, i] for (_, i), w in own.items())
    for j, gate in gates.items():
        inside = [math.exp(logit(j, i)) for i in range(P - 1)]
        out = out + gate / total * sum(w * v[j, i] for i, w in enumerate(inside)) / sum(inside)
    return out


def random_grid(N, B=2, H=2):
    generator = torch.Generator().manual_seed(N)
    k, v = (
        torch.randn(B, N, L + 1, H, D, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    chunk, offset = (
        x.flatten()[None]
        for x in torch.meshgrid(torch.arange(N), torch.arange(L + 1), indexing="ij")
    )
    first = torch.where(chunk < 3, 0, 3)
    q = 2 * torch.randn(B, chunk.shape[1], H, D, generator=generator, dtype=torch.float64)
    turned = rotate(k.flatten(1, 2), offset.expand(B, -1), BASE).view_as(k)
    places = Places(*(x.expand(B, -1) for x in (chunk, offset, first)))
    return q, k, turned, v, places


@pytest.mark.parametrize("form", [dense, gathered])
@pytest.mark.parametrize(("local", "retrieved"), [(0, 1), (1, 2), (2, 1), (9, 1)])
def test_both_forms_are_the_definition(form, local, retrieved):
    reach = Reach(local, retrieved, BASE)
    q, k, turned, v, places = random_grid(9)
    out = form(q, turned, v, places, reach)
    for x in range(q.shape[1]):
        n, o, first = (int(part[0, x]) for part in places)
        for b, h in ((0, 0), (1, 1)):
            expected = by_hand(q[b, x, h], k[b, :, :, h], v[b, :, :, h], n, o, first, reach)
            torch.testing.assert_close(out[b, x, h], expected, rtol=1e-9, atol=1e-9)


def test_both_forms_take_the_nearest_of_equal_landmarks():
    q, _, turned, v, places = random_grid(9)
    turned[:, :, -1] = turned[:, :1, -1]
    outs = [form(q, turned, v, places, Reach(1, 2, BASE)) for form in (dense, gathered)]
    torch.testing.assert_close(*outs, rtol=1e-9, atol=1e-9)


def test_weights_of_all_tokens_sum_to_one():
    q, _, turned, v, places = random_grid(9)
    for form in (dense, gathered):
        out = form(q, turned, torch.ones_like(v), places, Reach(1, 2, BASE))
        torch.testing.assert_close(out, torch.ones_like(out))


def test_gradients_of_both_forms_are_right():
    q, _, k, v, places = random_grid(5, B=1, H=1)
    for form in (dense, gathered):
        torch.autograd.gradcheck(
            lambda q, k, v, form=form: form(q, k, v, places, Reach(1, 2, BASE)),
            [x.clone().requires_grad_() for x in (q, k, v)],
            fast_mode=True,
        )


@pytest.mark.parametrize("form", [dense, gathered])
def test_a_landmark_that_no_query_sees_may_hold_anything_in_a_backward_too(form):
    q, _, k, v, places = random_grid(9)
    few = places.chunk[0] == 8  # the landmark's own query among them
    q, places = q[:, few], Places(*(x[:, few] for x in places))
    found = []
    for of_key, of_value in ((0.0, 0.0), (math.nan, 0.0), (0.0, math.nan)):
        k[:, 8, L], v[:, 8, L] = of_key, of_value
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = form(*leaves, places, Reach(1, 2, BASE))
        found.append(torch.autograd.grad(out.sin().sum(), leaves))
    for spoilt in found[1:]:
        assert all(map(torch.equal, spoilt, found[0]))


@pytest.fixture(params=[(1, 1), (0, 2), (9, 2)], ids=str)
def stack(request):
    """A stack that retrieves in the laws' sequences, and one that always sees everything."""
    local, retrieved = request.param
    torch.manual_seed(0)
    stack = LandmarkConfig(
        num_layers=2,
        head_dim=D,
        chunk_size=3,
        local_chunks=local,
        retrieved_chunks=retrieved,
        rope_base=BASE,
    ).build(C)
    for module in stack.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.4)
    nn.init.normal_(stack.landmark)
    return stack


@pytest.mark.parametrize("law", LAWS)
def test_every_law_is_kept(stack, law):
    LAWS[law](stack)


def test_transforms_which_cannot_look_at_borders_give_the_same(stack):
    """They run all sequences at once, as graphs do."""
    x, borders = torch.randn(1, 44, C), torch.tensor([0, 23, 23, 26, 43, 44])
    found, _ = torch.func.vjp(lambda x: stack(x, cu_seqlens=borders)[0], x)
    torch.testing.assert_close(found, stack(x, cu_seqlens=borders)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_computed_twice_have_the_same_gradients(stack, reentrant):
    """Both for a whole text and for one that goes on from a state."""
    x = torch.randn(2, 17, C)

    def gradients():
        stack.zero_grad()
        inputs = x.clone().requires_grad_()
        y, state = stack(inputs[:, :10], stack.init_state(2))
        parts = (stack(inputs)[0], y, stack(inputs[:, 10:], state)[0])
        torch.cat(parts, 1).square().sum().backward()
        return [inputs.grad, *(weight.grad for weight in stack.parameters())]

    wanted = gradients()
    for layer in stack.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=reentrant)
    torch.testing.assert_close(gradients(), wanted)


def test_arguments_replaced_are_refused_by_name(stack):
    check_module_arguments(stack)


@torch.no_grad()
def test_a_state_without_all_chunks_of_its_tokens_is_refused(stack):
    x = torch.randn(2, 3 * L + 1, C)
    _, state = stack(x, stack.init_state(2))
    cut = state._replace(k=state.k[:, :, :-1], v=state.v[:, :, :-1])
    for bad in (cut, state._replace(seen=-state.seen)):
        for call in (lambda bad: stack(x, bad), lambda bad: stack.reserve(bad, 3)):
            with pytest.raises(ValueError, match=r"state\.seen must be from 0 to N L"):
                call(bad)


def test_a_token_of_far_behind_is_seen_only_if_its_chunk_is_chosen(stack):
    """A chunk that is not chosen by any head of any layer cannot matter, and a chosen one does."""
    x = torch.randn(1, 60, C, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        y = stack(x)[0]
        moved = []
        for chunk in range(10):
            other = x.clone()
            other[:, 3 * chunk : 3 * chunk + 3] += 1
            moved.append(not torch.equal(stack(other)[0][:, -1], y[:, -1]))
    assert any(moved)
    assert all(moved) == (stack.config.local_chunks == 9)


def test_a_landmark_model_in_training_is_told_by_all_its_weights():
    model = LMConfig(
        vocab_size=11, d_model=C, stack=LandmarkConfig(num_layers=2, head_dim=D, chunk_size=3)
    ).build()
    tokens = torch.randint(11, (2, 20), generator=torch.Generator().manual_seed(0))
    model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
    for name, weight in model.named_parameters():
        assert weight.grad is not None, name
        assert weight.grad.abs().sum() > 0, name


def test_a_stack_rotates_by_the_base_that_is_told():
    config, x = LandmarkConfig(num_layers=1, head_dim=D, chunk_size=3), torch.randn(1, 9, C)
    near, far = config.build(C), replace(config, rope_base=30.0).build(C)
    far.load_state_dict(near.state_dict())
    assert not torch.allclose(near(x)[0], far(x)[0], atol=1e-4)


def test_fields_replaced_are_named_or_right():
    x = torch.randn(1, 9, 16)
    config = LandmarkConfig(num_layers=1, head_dim=4, chunk_size=2)

    def use(config):
        return config.build(16)(x)[0]

    check_fields(config, use)


def test_half_precision_stays_near_float32_where_nothing_is_chosen():
    torch.manual_seed(0)
    stack = LandmarkConfig(num_layers=2, head_dim=D, chunk_size=3).build(C)
    x = torch.randn(2, 30, C, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        full = stack(x)[0]
        low = stack.to(torch.bfloat16)(x.to(torch.bfloat16))[0]
    assert low.dtype == torch.bfloat16
    assert_close("bf16", low.float(), full, rtol=1e-2)
