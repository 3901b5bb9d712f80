"""RAT attention: the chunk form against the definition, the paper's limits, states and packing."""

from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.positions import apply_rope, rope_angles
from mezzo_core.testing import assert_close, grads
from mezzo_rat.ops.rat_attention import (
    RATState,
    chunk_rat_attention,
    init_state,
    recurrent_rat_attention,
    reserve,
)

ROPES = ("chunk", "token", None)


def draw(B, T, H, G, D, *, dtype=torch.float32, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return {
        "q": normal(B, T, G, D),
        "k": normal(B, T, G, D),
        "v": normal(B, T, H, D),
        "g": normal(B, T, H, D) + 1,
        "z": normal(B, T, H, D),
        "gate_bias": normal(H, D),
    }


def empty_state(inputs):
    B, _, H, D = inputs["v"].shape
    return init_state(B, H, D, dtype=inputs["v"].dtype, device=inputs["v"].device)


def tokens(inputs, start, end):
    return {name: x if name == "gate_bias" else x[:, start:end] for name, x in inputs.items()}


def rows(inputs, row):
    return {name: x if name == "gate_bias" else x[row : row + 1] for name, x in inputs.items()}


@settings(max_examples=settings().max_examples // 4)
@given(
    T=st.integers(1, 13),
    L=st.integers(1, 15),
    heads=st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (6, 3)]),
    rope=st.sampled_from(ROPES),
    seed=st.integers(0, 99),
)
def test_chunk_form_equals_the_definition_with_all_gradients(T, L, heads, rope, seed):
    inputs = draw(2, T, *heads, 4, dtype=torch.float64, seed=seed)
    dout = torch.randn_like(inputs["v"])
    form = {"chunk_size": L, "rope": rope}
    ref, dref = grads(lambda **x: recurrent_rat_attention(**x, **form).out, inputs, dout)
    out, dout_ = grads(lambda **x: chunk_rat_attention(**x, **form).out, inputs, dout)
    assert_close("out", out, ref, rtol=1e-6, atol=1e-9)
    for name, ref_grad in dref.items():
        assert_close(f"d{name}", dout_[name], ref_grad, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
@pytest.mark.parametrize(("T", "L"), [(1, 16), (63, 16), (65, 16), (100, 7)])
def test_float32_is_exact_to_rounding(op, T, L):
    inputs = draw(1, T, 4, 2, 8, dtype=torch.float64)
    ref = recurrent_rat_attention(**inputs, chunk_size=L).out
    low = {name: x.float() for name, x in inputs.items()}
    assert_close("out", op(**low, chunk_size=L).out, ref, rtol=1e-5)


@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
def test_bfloat16_inputs_lose_only_the_precision_of_their_products(op):
    low = {name: x.bfloat16() for name, x in draw(2, 40, 4, 2, 16).items()}
    ref = recurrent_rat_attention(**{n: x.float() for n, x in low.items()}, chunk_size=8).out
    out = op(**low, chunk_size=8).out
    assert out.dtype == torch.bfloat16
    assert_close("out", out, ref, rtol=5e-3)


@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
def test_autocast_leaves_products_in_the_dtype_of_the_inputs(op):
    inputs = draw(2, 20, 2, 1, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = op(**inputs, chunk_size=4).out
    assert torch.equal(out, op(**inputs, chunk_size=4).out)


@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
@pytest.mark.parametrize("rope", ROPES)
def test_gradients_are_those_of_finite_differences(op, rope):
    inputs = draw(1, 5, 2, 1, 2, dtype=torch.float64)
    names, values = zip(*inputs.items(), strict=True)
    for value in values:
        value.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *xs: op(**dict(zip(names, xs, strict=True)), chunk_size=2, rope=rope).out, values
    )


@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
def test_gradients_through_states_are_those_of_finite_differences(op):
    inputs = draw(2, 4, 2, 1, 2, dtype=torch.float64, seed=1)
    _, before = chunk_rat_attention(
        **draw(2, 7, 2, 1, 2, dtype=torch.float64),
        chunk_size=3,
        initial_state=empty_state(inputs),
        lengths=torch.tensor([7, 3]),
    )
    names, values = zip(*inputs.items(), strict=True)
    leaves = [x.detach().clone().requires_grad_() for x in (*values, *before[:4])]

    def run(*xs):
        state = RATState(*xs[-4:], before.lengths)
        x = dict(zip(names, xs, strict=False))
        out, after = op(**x, chunk_size=3, initial_state=state, lengths=torch.tensor([4, 2]))
        # Slots that hold no closed chunk are never read, and the two forms leave them different.
        held = torch.arange(after.k_ends.shape[1]) < (after.lengths // 3)[:, None]
        ends = (x.where(held[..., None, None], torch.zeros(())) for x in after[2:4])
        return out[0], out[1, :2], after.k, after.v, *ends

    assert torch.autograd.gradcheck(run, leaves)


def test_packed_gradients_are_those_of_finite_differences():
    inputs = draw(1, 6, 2, 1, 2, dtype=torch.float64)
    names, values = zip(*inputs.items(), strict=True)
    for value in values:
        value.requires_grad_()
    cu_seqlens = torch.tensor([0, 1, 1, 6])
    assert torch.autograd.gradcheck(
        lambda *xs: (
            chunk_rat_attention(
                **dict(zip(names, xs, strict=True)), chunk_size=2, cu_seqlens=cu_seqlens
            ).out
        ),
        values,
    )


@settings(max_examples=settings().max_examples // 5)
@given(
    splits=st.lists(st.integers(0, 7), min_size=1, max_size=5).filter(any),
    L=st.integers(1, 6),
    rope=st.sampled_from(ROPES),
    seed=st.integers(0, 99),
)
def test_segments_through_a_state_equal_the_whole(splits, L, rope, seed):
    inputs = draw(2, sum(splits), 2, 1, 4, seed=seed)
    form = {"chunk_size": L, "rope": rope}
    whole = chunk_rat_attention(**inputs, **form).out
    for op in (chunk_rat_attention, recurrent_rat_attention):
        state, outputs = empty_state(inputs), []
        for end, length in zip(accumulate(splits), splits, strict=True):
            out, state = op(**tokens(inputs, end - length, end), **form, initial_state=state)
            outputs.append(out)
        assert_close(op.__name__, torch.cat(outputs, 1), whole, rtol=1e-5)
        assert state.lengths.tolist() == [sum(splits)] * 2
        assert state.k_ends.shape[1] == -(-sum(splits) // L), "no more slots than chunks"


@settings(max_examples=settings().max_examples // 6)
@given(
    calls=st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=4),
    L=st.integers(1, 5),
    seed=st.integers(0, 99),
)
def test_rows_of_different_lengths_each_equal_their_own_whole(calls, L, seed):
    totals = [sum(lengths) for lengths in zip(*calls, strict=True)]
    inputs = draw(2, max(*totals, 1), 2, 2, 4, seed=seed)
    for op in (chunk_rat_attention, recurrent_rat_attention):
        state, outputs = empty_state(inputs), [[], []]
        for lengths in calls:
            T = max(*lengths, 1)
            call = draw(2, T, 2, 2, 4, seed=seed + 1)  # garbage where a row has no token
            for row, (length, done) in enumerate(zip(lengths, state.lengths.tolist(), strict=True)):
                for name in ("q", "k", "v", "g", "z"):
                    call[name][row, :length] = inputs[name][row, done : done + length]
            call["gate_bias"] = inputs["gate_bias"]
            out, state = op(
                **call, chunk_size=L, initial_state=state, lengths=torch.tensor(lengths)
            )
            for row, length in enumerate(lengths):
                outputs[row].append(out[row : row + 1, :length])
        for row, total in enumerate(totals):
            alone = tokens(rows(inputs, row), 0, total)
            whole = chunk_rat_attention(**alone, chunk_size=L).out
            assert_close(f"row {row}", torch.cat(outputs[row], 1), whole, rtol=1e-5)


@settings(max_examples=settings().max_examples // 5)
@given(
    lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5).filter(any),
    L=st.integers(1, 6),
    rope=st.sampled_from(ROPES),
    padding=st.integers(0, 2),
)
def test_packed_sequences_equal_each_alone_with_all_gradients(lengths, L, rope, padding):
    borders = [0, *accumulate(lengths)]
    T = borders[-1]
    inputs = draw(1, T, 2, 1, 4, dtype=torch.float64)
    dout = torch.randn_like(inputs["v"])
    cu_seqlens = torch.tensor(borders + [T] * padding, dtype=torch.int32)
    form = {"chunk_size": L, "rope": rope}

    def alone(**x):
        parts = [tokens(x, a, b) for a, b in pairwise(borders) if a < b]
        return torch.cat([chunk_rat_attention(**part, **form).out for part in parts], 1)

    ref, dref = grads(alone, inputs, dout)
    out, dout_ = grads(
        lambda **x: chunk_rat_attention(**x, **form, cu_seqlens=cu_seqlens).out, inputs, dout
    )
    assert_close("out", out, ref, rtol=1e-6)
    for name, ref_grad in dref.items():
        assert_close(f"d{name}", dout_[name], ref_grad, rtol=1e-6, atol=1e-8)


def test_chunks_of_one_token_are_softmax_attention_on_scaled_keys_and_values():
    inputs = draw(2, 9, 4, 2, 8)
    q, k, v, g, z, bias = inputs.values()
    write = 1 - torch.sigmoid(g + bias)
    angles = rope_angles(torch.arange(9), 8, 10_000.0)
    q, k = q.repeat(1, 1, 2, 1), write * k.repeat(1, 1, 2, 1)  # head h reads group h % 2
    attended = F.scaled_dot_product_attention(
        apply_rope(q, *angles).transpose(1, 2),
        apply_rope(k, *angles).transpose(1, 2),
        (write * v).transpose(1, 2),
        is_causal=True,
    ).transpose(1, 2)
    for rope in ("chunk", "token"):
        out = chunk_rat_attention(**inputs, chunk_size=1, rope=rope).out
        assert_close(f"rope by {rope}", out, z.sigmoid() * attended, rtol=1e-5)


@pytest.mark.parametrize("L", [9, 10, 1000])
def test_one_chunk_is_the_gated_linear_rnn(L):
    inputs = draw(2, 9, 4, 2, 8)
    _, _, v, g, z, bias = inputs.values()
    f, h, outputs = torch.sigmoid(g + bias), torch.zeros(2, 4, 8), []
    for t in range(9):
        h = f[:, t] * h + (1 - f[:, t]) * v[:, t]
        outputs.append(h)
    expected = z.sigmoid() * torch.stack(outputs, 1)
    assert_close("out", chunk_rat_attention(**inputs, chunk_size=L).out, expected, rtol=1e-5)


def test_rope_by_chunk_does_not_turn_what_happens_inside_the_first_chunk():
    inputs = draw(1, 10, 2, 1, 8)
    turned, plain = (
        chunk_rat_attention(**inputs, chunk_size=5, rope=rope).out for rope in ("chunk", None)
    )
    assert torch.equal(turned[:, :5], plain[:, :5])
    assert not torch.allclose(turned[:, 5:], plain[:, 5:])


@pytest.mark.parametrize("rope", ROPES)
def test_every_token_attends_to_earlier_chunk_ends_and_to_itself(rope):
    T, L, D = 8, 3, 4
    inputs = draw(1, T, 2, 1, D, dtype=torch.float64)
    q, k, v, g, _, bias = (x[0] if x.ndim == 4 else x for x in inputs.values())
    f = torch.sigmoid(g + bias)

    def place(t):
        return {"chunk": t // L, "token": t, None: 0}[rope]

    def turned(x, t):
        return apply_rope(x[None, None], *rope_angles(torch.tensor([place(t)]), D))[0, 0]

    running, outputs = [], []
    for t in range(T):
        old = (0.0, 0.0) if t % L == 0 else running[-1]
        running.append(
            tuple(f[t] * o + (1 - f[t]) * x[t] for o, x in zip(old, (k, v), strict=True))
        )
        seen = [j * L + L - 1 for j in range(t // L)] + [t]
        logits = [(turned(q[t], t) * turned(running[s][0], s)).sum(-1) / D**0.5 for s in seen]
        weights = torch.stack(logits).softmax(0)
        outputs.append(sum(w[:, None] * running[s][1] for w, s in zip(weights, seen, strict=True)))
    expected = inputs["z"].sigmoid() * torch.stack(outputs)
    for op in (chunk_rat_attention, recurrent_rat_attention):
        # RoPE's angles are float32 whatever the inputs are.
        assert_close(op.__name__, op(**inputs, chunk_size=L, rope=rope).out, expected, rtol=1e-6)


def test_the_scale_multiplies_the_logits():
    inputs = draw(1, 8, 2, 1, 4)
    louder = {**inputs, "q": inputs["q"] * 3}
    out = chunk_rat_attention(**inputs, chunk_size=2, scale=1.5).out
    assert_close("out", out, chunk_rat_attention(**louder, chunk_size=2).out, rtol=1e-5)


@pytest.mark.parametrize("scale", [-1.5, -1e-3, 0.0, 2.0])
@pytest.mark.parametrize("packed", [False, True])
def test_any_finite_scale_gives_what_the_definition_gives(scale, packed):
    inputs, dout = draw(1, 11, 2, 1, 4), torch.randn(1, 11, 2, 4)
    form = {"chunk_size": 3, "scale": scale}
    cu_seqlens = torch.tensor([0, 4, 11]) if packed else None

    def definition(**x):
        borders = pairwise(cu_seqlens.tolist()) if packed else [(0, 11)]
        outputs = [recurrent_rat_attention(**tokens(x, a, b), **form).out for a, b in borders]
        return torch.cat(outputs, 1)

    ref, dref = grads(definition, inputs, dout)
    out, found = grads(
        lambda **x: chunk_rat_attention(**x, **form, cu_seqlens=cu_seqlens).out, inputs, dout
    )
    assert_close("out", out, ref, rtol=1e-5)
    for name, truth in dref.items():
        assert_close(f"d{name}", found[name], truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
def test_what_a_state_does_not_use_may_hold_anything(op):
    inputs = draw(2, 11, 2, 1, 4)
    _, state = chunk_rat_attention(
        **tokens(inputs, 0, 4), chunk_size=4, initial_state=empty_state(inputs)
    )
    state = reserve(state, 100, 4)
    spoiled = RATState(*(field.clone() for field in state))
    spoiled.k[:], spoiled.v[:] = float("nan"), float("nan")  # no chunk is open
    spoiled.k_ends[:, 1:], spoiled.v_ends[:, 1:] = float("nan"), float("nan")
    (out, _), (expected, _) = (
        op(**tokens(inputs, 4, 11), chunk_size=4, initial_state=start) for start in (spoiled, state)
    )
    assert torch.equal(out, expected)


def test_a_missing_output_gate_and_bias_mean_ones_and_zeros():
    inputs = draw(1, 8, 2, 1, 4)
    plain = {name: inputs[name] for name in ("q", "k", "v", "g")}
    full = {**plain, "z": torch.full_like(inputs["v"], 1e4), "gate_bias": torch.zeros(2, 4)}
    assert torch.equal(
        chunk_rat_attention(**plain, chunk_size=3).out,
        chunk_rat_attention(**full, chunk_size=3).out,
    )


@pytest.mark.parametrize("logit", [float("inf"), float("-inf"), 50.0, -50.0, -1e-4])
def test_extreme_gates_give_finite_outputs_and_gradients(logit):
    inputs = draw(1, 9, 2, 1, 4)
    inputs["g"].fill_(logit)
    out, found = grads(
        lambda **x: chunk_rat_attention(**x, chunk_size=4).out, inputs, torch.ones(1, 9, 2, 4)
    )
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in found.values())
    if logit == float("inf"):
        assert (out == 0).all(), "a gate that keeps everything writes nothing"


def test_a_gate_next_to_one_keeps_its_digits():
    inputs = draw(1, 6, 2, 1, 4, dtype=torch.float64)
    inputs["g"].fill_(14.0)  # 1 - sigmoid(14 + bias) would keep two or three digits in float32
    del inputs["gate_bias"]
    ref = recurrent_rat_attention(**inputs, chunk_size=6).out
    out = chunk_rat_attention(**{n: x.float() for n, x in inputs.items()}, chunk_size=6).out
    assert_close("out", out, ref, rtol=1e-5)


def test_sequences_of_more_than_65536_tokens_are_exact_at_their_ends():
    T, L = 66_000, 8192
    inputs = draw(1, T, 1, 1, 2)
    out = chunk_rat_attention(**inputs, chunk_size=L, rope=None).out
    state = empty_state(inputs)
    for start in range(0, T, L):
        last, state = chunk_rat_attention(
            **tokens(inputs, start, start + L), chunk_size=L, rope=None, initial_state=state
        )
    assert_close("the last chunk", out[:, -(T % L) :], last, rtol=1e-5)


def test_views_that_are_not_contiguous_give_the_same():
    inputs = draw(2, 9, 4, 2, 8)
    strided = {
        name: x if name == "gate_bias" else x.transpose(0, 1).contiguous().transpose(0, 1)
        for name, x in inputs.items()
    }
    assert not strided["v"].is_contiguous()
    out = chunk_rat_attention(**strided, chunk_size=4).out
    assert_close("out", out, chunk_rat_attention(**inputs, chunk_size=4).out, rtol=1e-6)


def test_a_row_does_not_depend_on_the_rest_of_the_batch():
    inputs = draw(3, 20, 4, 2, 8)
    out = chunk_rat_attention(**inputs, chunk_size=4).out
    assert_close(
        "row", chunk_rat_attention(**rows(inputs, 1), chunk_size=4).out, out[1:2], rtol=1e-6
    )


def test_no_tokens_give_a_copy_of_the_state():
    inputs = draw(2, 0, 2, 1, 4)
    state = reserve(empty_state(inputs), 1, 4)
    for op in (chunk_rat_attention, recurrent_rat_attention):
        out, after = op(**inputs, chunk_size=4, initial_state=state)
        assert out.shape == (2, 0, 2, 4)
        for old, new in zip(state, after, strict=True):
            assert torch.equal(old, new)
            assert old.data_ptr() != new.data_ptr()


def test_reserved_slots_stay_and_change_nothing():
    inputs = draw(2, 11, 2, 1, 4)
    roomy = reserve(empty_state(inputs), 100, 4)
    assert roomy.k_ends.shape[1] == 25
    out, state = chunk_rat_attention(**tokens(inputs, 0, 6), chunk_size=4, initial_state=roomy)
    rest, state = recurrent_rat_attention(
        **tokens(inputs, 6, 11), chunk_size=4, initial_state=state
    )
    assert state.k_ends.shape[1] == 25
    whole = chunk_rat_attention(**inputs, chunk_size=4).out
    assert_close("out", torch.cat([out, rest], 1), whole, rtol=1e-5)


def test_where_lengths_cannot_be_read_all_slots_count_as_full():
    state = init_state(2, 2, 4, dtype=torch.float32, device=torch.device("meta"))
    assert [len(reserve(reserve(state, 8, 4), n, 4).k_ends[0]) for n in (1, 5)] == [2, 4]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.any_shapes
def test_training_compiles_without_a_graph_break(packed):
    torch._dynamo.reset()
    inputs = draw(1, 11, 4, 2, 4)
    cu_seqlens = torch.tensor([0, 4, 4, 11]) if packed else None

    def run(**x):
        return chunk_rat_attention(**x, chunk_size=3, cu_seqlens=cu_seqlens).out

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    ref, dref = grads(run, inputs, torch.ones(1, 11, 4, 4))
    out, dout = grads(compiled, inputs, torch.ones(1, 11, 4, 4))
    assert_close("out", out, ref, rtol=1e-5)
    for name, grad in dref.items():
        assert_close(f"d{name}", dout[name], grad, rtol=1e-5, atol=1e-6)


@pytest.mark.any_shapes
def test_a_decoding_step_compiles_and_reports_a_state_that_is_full():
    torch._dynamo.reset()
    inputs = draw(2, 5, 2, 1, 4)

    def step(state, **x):
        return recurrent_rat_attention(**x, chunk_size=2, initial_state=state)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    _, state = chunk_rat_attention(
        **tokens(inputs, 0, 3), chunk_size=2, initial_state=empty_state(inputs)
    )
    out, state = compiled(state, **tokens(inputs, 3, 4))
    whole = chunk_rat_attention(**inputs, chunk_size=2).out
    assert_close("step", out, whole[:, 3:4], rtol=1e-5)
    with pytest.raises(RuntimeError, match="out of bounds"):
        compiled(state, **tokens(inputs, 4, 5))
    out, _ = compiled(reserve(state, 1, 2), **tokens(inputs, 4, 5))
    assert_close("step with room", out, whole[:, 4:], rtol=1e-5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"v": torch.zeros(2, 4, 2, 0)}, ValueError, "v must be .* D at least 1"),
        ({"g": torch.zeros(2, 4, 2, 4, dtype=torch.int64)}, TypeError, "g must be floating"),
        (
            {"k": torch.zeros(2, 4, 1, 4, dtype=torch.float64)},
            TypeError,
            "must have one floating dtype",
        ),
        (
            {"k": torch.zeros(2, 4, 1, 4, device="meta")},
            ValueError,
            "k is on meta, v on cpu",
        ),
        ({"q": torch.zeros(2, 4, 1, 4, dtype=torch.float8_e4m3fn)}, TypeError, "q must be float"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
        ({"rope_base": 0.0}, ValueError, "rope_base must be positive"),
        ({"rope": "tokens"}, ValueError, 'rope must be "chunk"'),
        ({"lengths": torch.tensor([1, 2])}, ValueError, "lengths needs an initial_state"),
        ({"impl": "fast"}, ValueError, "impl must be one of"),
    ],
)
@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
@pytest.mark.any_shapes
def test_bad_arguments_are_named(op, change, error, message):
    with pytest.raises(error, match=message):
        op(**{**draw(2, 4, 2, 1, 4), "chunk_size": 2, **change})


def test_a_missing_kernel_is_said_and_never_replaced(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match=r"head dimension of 4; supported: 32, 64, 128, 256"):
        chunk_rat_attention(**draw(1, 4, 2, 1, 4), chunk_size=2, impl="triton")
    with pytest.raises(ValueError, match="does not support a loop over tokens"):
        recurrent_rat_attention(**draw(1, 4, 2, 1, 32), chunk_size=2, impl="triton")


def test_an_odd_head_dimension_cannot_rotate():
    inputs = draw(1, 4, 2, 1, 3)
    with pytest.raises(ValueError, match="rope needs an even head dimension"):
        chunk_rat_attention(**inputs, chunk_size=2)
    assert chunk_rat_attention(**inputs, chunk_size=2, rope=None).out.isfinite().all()


@pytest.mark.parametrize(
    ("cu_seqlens", "error"),
    [
        (torch.tensor([0, 3, 2, 4]), ValueError),
        (torch.tensor([1, 4]), ValueError),
        (torch.tensor([0, 3]), ValueError),
        (torch.tensor([0]), ValueError),
        (torch.tensor([[0, 4]]), ValueError),
        (torch.tensor([0.0, 4.0]), TypeError),
    ],
)
@pytest.mark.any_shapes
def test_bad_borders_are_named(cu_seqlens, error):
    with pytest.raises(error, match="cu_seqlens must"):
        chunk_rat_attention(**draw(1, 4, 2, 1, 4), chunk_size=2, cu_seqlens=cu_seqlens)


def test_packing_excludes_batches_and_states():
    borders = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="cu_seqlens packs"):
        chunk_rat_attention(**draw(2, 4, 2, 1, 4), chunk_size=2, cu_seqlens=borders)
    inputs = draw(1, 4, 2, 1, 4)
    with pytest.raises(ValueError, match="cu_seqlens and initial_state exclude"):
        chunk_rat_attention(
            **inputs, chunk_size=2, cu_seqlens=borders, initial_state=empty_state(inputs)
        )


@pytest.mark.parametrize(
    ("field", "shape", "message"),
    [
        ("k", (2, 2, 3), r"initial_state\.k must be"),
        ("lengths", (3,), r"initial_state\.lengths must be"),
        ("k_ends", (2, 1, 1, 4), r"initial_state\.._ends must be"),
        ("v_ends", (2, 5, 2, 4), r"initial_state\.._ends must be"),
    ],
)
def test_a_state_of_other_inputs_is_refused(field, shape, message):
    inputs = draw(2, 4, 2, 1, 4)
    state = empty_state(inputs)
    wrong = torch.zeros(shape, dtype=getattr(state, field).dtype)
    with pytest.raises(ValueError, match=message):
        chunk_rat_attention(**inputs, chunk_size=2, initial_state=state._replace(**{field: wrong}))


@pytest.mark.gpu
def test_a_gpu_gives_what_the_cpu_gives():
    inputs = draw(2, 100, 4, 2, 32)
    on_gpu = {name: x.cuda() for name, x in inputs.items()}
    dout = torch.randn(2, 100, 4, 32)
    ref, dref = grads(lambda **x: chunk_rat_attention(**x, chunk_size=16).out, inputs, dout)
    out, found = grads(lambda **x: chunk_rat_attention(**x, chunk_size=16).out, on_gpu, dout.cuda())
    assert_close("out", out.cpu(), ref, rtol=1e-5)
    for name, grad in dref.items():
        assert_close(f"d{name}", found[name].cpu(), grad, rtol=1e-5)


@pytest.mark.parametrize("op", [chunk_rat_attention, recurrent_rat_attention])
def test_large_logits_do_not_overflow_in_float16(op):
    inputs = {name: (1000 * x).half() for name, x in draw(1, 9, 2, 1, 16).items()}
    assert op(**inputs, chunk_size=4).out.isfinite().all()


@pytest.mark.gpu
def test_decoding_runs_in_a_cuda_graph():
    inputs = draw(2, 20, 4, 2, 32, device="cuda")
    whole = chunk_rat_attention(**inputs, chunk_size=4).out
    _, state = chunk_rat_attention(
        **tokens(inputs, 0, 6), chunk_size=4, initial_state=reserve(empty_state(inputs), 20, 4)
    )
    state = RATState(*(x.clone() for x in state))
    token = {name: x.clone() for name, x in tokens(inputs, 6, 7).items()}
    recurrent_rat_attention(**token, chunk_size=4, initial_state=state)  # warm up
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, after = recurrent_rat_attention(**token, chunk_size=4, initial_state=state)
    for t in range(6, 20):
        for name, x in tokens(inputs, t, t + 1).items():
            token[name].copy_(x)
        graph.replay()
        assert_close(f"token {t}", out, whole[:, t : t + 1], rtol=1e-5)
        for held, new in zip(state, after, strict=True):
            held.copy_(new)
