"""Steps of RAT attention: by kernels as by the reference, and what they refuse."""

import pytest
import torch
from mezzo_core.positions import rope_angles
from mezzo_core.testing import assert_close
from mezzo_rat.ops.rat_attention import (
    RATState,
    chunk_rat_attention_projected,
    init_state,
    reserve,
    step_rat_attention_,
)
from mezzo_rat.ops.rat_attention.arguments import Form
from mezzo_rat.ops.rat_attention.triton import step

from .inputs import DEVICE, draw

NAN = float("nan")
gpu = pytest.mark.gpu


@pytest.mark.parametrize("B", [1, 3])
def test_steps_split_over_many_ends_equal_the_reference(B):
    H, G, D, L, N = 2, 1, 32, 2, 200
    inputs = draw(B, 1, H, G, D)
    draws = torch.Generator().manual_seed(3)
    fields = [(B, H, D)] * 2 + [(B, N, H, D)] * 2
    lengths = torch.tensor([2 * N - 2, 0, 131][:B], device=DEVICE)
    after, outs = [], []
    for impl in ("triton", "reference"):
        draws.manual_seed(3)
        state = RATState(
            *(torch.randn(f, generator=draws).to(DEVICE) for f in fields), lengths.clone()
        )
        with torch.no_grad():
            outs.append(
                step_rat_attention_(
                    **inputs, state=state, num_heads=H, num_groups=G, chunk_size=L, impl=impl
                )
            )
        after.append(state)
    assert_close("out", outs[0], outs[1], rtol=1e-5)
    ours, ref = after
    assert torch.equal(ours.lengths, lengths + 1)
    for name in ("k", "v"):
        assert_close(name, getattr(ours, name), getattr(ref, name), rtol=1e-5)
    closed = torch.arange(N, device=DEVICE) < (ours.lengths // L)[:, None]
    for name in ("k_ends", "v_ends"):
        assert_close(name, getattr(ours, name)[closed], getattr(ref, name)[closed], rtol=1e-5)


@pytest.mark.parametrize(("rope", "most"), [("chunk", 3), ("token", 9)])
def test_a_step_beyond_the_room_reads_no_angle_beyond_the_table(monkeypatch, rope, most):
    B, N, H, G, D, L = 1, 2, 2, 1, 32, 4  # for n // L = 4 or n = 19

    def angles_before_nan(num_places, dim, base, device):
        assert num_places <= most, "one place more than the room has"
        tables = rope_angles(torch.arange(num_places, device=device), dim, base)
        return tuple(torch.cat([x, x * NAN])[:num_places] for x in tables)

    monkeypatch.setattr(step, "_angles", angles_before_nan)
    state = init_state(B, H, D, dtype=torch.float32, device=torch.device(DEVICE))
    state = reserve(state, N * L, L)._replace(lengths=torch.full((B,), 19, device=DEVICE))
    form = Form(H, G, True, L, rope, 1e4, D**-0.5)
    # The public op would refuse such a state on a CPU, where it can read the lengths.
    step_op = torch.ops.mezzo_rat.rat_attention_step_
    assert step_op(*draw(B, 1, H, G, D).values(), *state, *form).isfinite().all()


@pytest.mark.parametrize(
    ("shape", "message"),
    [((1, 1, 256), r"state\.k must be"), ((2, 3, 256), "one token of each row, got 3")],
)
@pytest.mark.any_shapes
def test_a_step_names_what_does_not_fit_its_state(shape, message):
    state = init_state(2, 2, 32, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match=message):
        step_rat_attention_(torch.zeros(shape), state, num_heads=2, num_groups=1, chunk_size=4)


def test_the_projection_of_a_step_may_lie_apart():
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 4, "impl": "triton"}
    inputs = draw(2, 1, 2, 1, 32)
    x = inputs["zvgqk"]
    outs = []
    with torch.no_grad():
        for laid_out in (x, x.transpose(0, 2).contiguous().transpose(0, 2)):
            state = init_state(2, 2, 32, dtype=torch.float32, device=torch.device(DEVICE))
            state = reserve(state, 8, chunk_size=4)
            outs.append(step_rat_attention_(**inputs | {"zvgqk": laid_out}, state=state, **form))
    assert torch.equal(*outs)


@pytest.mark.parametrize("field", RATState._fields)
def test_a_step_by_kernels_refuses_a_state_that_is_spread_in_memory(field):
    state = reserve(
        init_state(2, 2, 32, dtype=torch.float32, device=torch.device(DEVICE)), 8, chunk_size=4
    )
    spread = torch.stack([getattr(state, field)] * 2, dim=-1)[..., 0]
    state = state._replace(**{field: spread})
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 4}
    with torch.no_grad(), pytest.raises(ValueError, match="a state that is not contiguous"):
        step_rat_attention_(**draw(2, 1, 2, 1, 32), state=state, impl="triton", **form)


@pytest.mark.parametrize("B", [1, 2])
@torch.no_grad()
def test_the_bias_and_the_rows_of_ends_may_lie_apart_in_a_step(B):
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 4, "impl": "triton"}
    empty = init_state(B, 2, 32, dtype=torch.float32, device=torch.device(DEVICE))
    first = chunk_rat_attention_projected(
        **draw(B, 7, 2, 1, 32), initial_state=reserve(empty, 8, 4), **form
    )[1]
    wide = [torch.cat([ends] * (2 if B > 1 else n), 1) for n, ends in enumerate(first[2:4], 2)]
    ends = [x[:, : first.k_ends.shape[1]] for x in wide]  # one row may have any two distances
    inputs, outs = draw(B, 1, 2, 1, 32), []
    apart = inputs | {"gate_bias": inputs["gate_bias"].repeat_interleave(2, -1)[..., ::2]}
    whole = RATState(*(x.clone(memory_format=torch.contiguous_format) for x in first))
    spread = RATState(*(x.clone() for x in whole[:2]), *ends, whole.lengths.clone())
    for given, state in ((inputs, whole), (apart, spread)):
        outs.append((step_rat_attention_(**given, state=state, **form), *state))
    assert all(map(torch.equal, *outs))
    one = whole.k_ends[:1].expand(B, -1, -1, -1)
    for k_ends, v_ends in ((whole.k_ends, spread.v_ends), (one, one)) if B > 1 else ():
        state = whole._replace(k_ends=k_ends, v_ends=v_ends)
        with pytest.raises(ValueError, match="a state that is not contiguous"):
            step_rat_attention_(**inputs, state=state, **form)


@pytest.mark.parametrize("name", ["zvgqk", "gate_bias", "k", "v_ends"])
def test_a_step_refuses_gradients(name):
    state = init_state(2, 2, 32, dtype=torch.float32, device=torch.device(DEVICE))
    inputs, state = draw(2, 1, 2, 1, 32), reserve(state, 8, chunk_size=4)
    (inputs[name] if name in inputs else getattr(state, name)).requires_grad_()
    with pytest.raises(RuntimeError, match="has no gradients: call it under"):
        step_rat_attention_(**inputs, state=state, num_heads=2, num_groups=1, chunk_size=4)


@pytest.mark.parametrize(
    ("D", "scale", "message"), [(4, None, "a head dimension of 4"), (32, -1.0, "a scale of -1.0")]
)
@torch.no_grad()
def test_a_step_that_has_no_kernel_is_said(D, scale, message):
    state = init_state(2, 2, D, dtype=torch.float32, device=torch.device(DEVICE))
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 4, "scale": scale, "impl": "triton"}
    with pytest.raises(ValueError, match=f"does not support {message}"):
        step_rat_attention_(**draw(2, 1, 2, 1, D), state=reserve(state, 8, 4), **form)


def test_a_state_that_is_full_is_said_on_a_cpu():
    state = init_state(1, 2, 32, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="no slot left"):
        step_rat_attention_(
            torch.zeros(1, 1, 256), state, num_heads=2, num_groups=1, chunk_size=4, impl="reference"
        )


def test_a_step_that_finds_no_slot_leaves_the_state_alone():
    form = {"num_heads": 2, "num_groups": 1, "chunk_size": 4}
    state = init_state(2, 2, 32, dtype=torch.float32, device=torch.device(DEVICE))
    state = chunk_rat_attention_projected(**draw(2, 4, 2, 1, 32), initial_state=state, **form)[1]
    before = [x.clone() for x in state]
    with torch.no_grad(), pytest.raises(ValueError, match="no slot left"):
        step_rat_attention_(**draw(2, 1, 2, 1, 32), state=state, impl="reference", **form)
    assert all(torch.equal(x, old) for x, old in zip(state, before, strict=True))


@gpu
@pytest.mark.parametrize(("B", "N"), [(1, 4096), (64, 256), (512, 300)])
def test_on_a_gpu_steps_at_the_papers_width(B, N):
    H, G, D, L = 16, 2, 128, 16
    inputs = draw(B, 1, H, G, D, dtype=torch.bfloat16)
    new = {"device": "cuda"}
    state = RATState(
        torch.randn(B, H, D, **new),
        torch.randn(B, H, D, **new),
        torch.randn(B, N, H, D, **new, dtype=torch.bfloat16),
        torch.randn(B, N, H, D, **new, dtype=torch.bfloat16),
        torch.randint(0, N * L, (B,), **new),
    )
    wide = RATState(*(s.clone().float() if s.is_floating_point() else s.clone() for s in state))
    form = {"num_heads": H, "num_groups": G, "chunk_size": L}
    with torch.no_grad():
        out = step_rat_attention_(**inputs, state=state, **form, impl="triton")
        ref = step_rat_attention_(
            inputs["zvgqk"].float(), wide, gate_bias=inputs["gate_bias"], **form, impl="reference"
        )
    assert_close("out", out, ref, rtol=5e-3)
    assert_close("k", state.k, wide.k, rtol=1e-5)
