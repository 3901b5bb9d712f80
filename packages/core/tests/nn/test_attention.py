import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mezzo_core.nn.attention import AttentionConfig
from mezzo_core.ops.attention import attention
from mezzo_core.positions import RopeScaling, apply_rope
from mezzo_core.testing import assert_close
from mezzo_core.testing.laws import (
    LAWS,
    check_isolated,
    check_packed,
    check_ragged,
    check_segments,
    check_step,
    each_law,
)
from torch._subclasses.fake_tensor import FakeTensorMode

C = 32
CONFIGS = {
    "rope": AttentionConfig(head_dim=8),
    "grouped": AttentionConfig(head_dim=8, num_kv_heads=2),
    "window": AttentionConfig(head_dim=8, window_size=5),
    "window of one": AttentionConfig(head_dim=8, window_size=1),
    "window past the end": AttentionConfig(head_dim=8, window_size=1000),
    "nope": AttentionConfig(head_dim=8, rope_base=None),
    "alibi": AttentionConfig(head_dim=8, rope_base=None, alibi="press"),
    "alibi window": AttentionConfig(
        head_dim=8, num_kv_heads=1, rope_base=None, alibi="olmo", window_size=4
    ),
    "normed": AttentionConfig(head_dim=8, num_kv_heads=2, qk_norm="rms", norm_eps=1e-3),
    "normed by head": AttentionConfig(
        head_dim=8, num_kv_heads=2, qk_norm="rms", norm_by_head=True, qkv_bias=True
    ),
    "layer norms": AttentionConfig(head_dim=8, window_size=5, qk_norm="layer"),
    "wide": AttentionConfig(head_dim=8, num_heads=6, num_kv_heads=2, qk_norm="rms"),
    "narrow and scaled": AttentionConfig(
        head_dim=8, num_heads=3, rope_scaling=RopeScaling(8.0, original_context=40)
    ),
}
AS_OTHERS = {"nope", "alibi", "layer norms", "wide", "narrow and scaled"}
AS_OTHERS |= {"normed", "normed by head"}
"""Forms whose state has the layout of another form's."""
configs = pytest.mark.parametrize("name", CONFIGS)
some = settings(max_examples=settings().max_examples // 6)


def build(config):
    if isinstance(config, str):
        config = CONFIGS[config]
    torch.manual_seed(0)
    mixer = config.build(C)
    for norm in (mixer.q_norm, mixer.k_norm):
        for weight in norm.parameters():
            torch.nn.init.normal_(weight, mean=1.0, std=0.3)
    return mixer


@pytest.mark.parametrize(("name", "law"), each_law(CONFIGS, AS_OTHERS))
def test_every_law_is_kept(name, law):
    LAWS[law](build(name))


@configs
def test_what_is_not_finite_stays_where_causality_lets_it_be_in_longer_sequences(name):
    check_isolated(build(name), 150)


@some
@given(st.data())
def test_any_room_will_do_and_may_be_reserved_again(data):
    config = CONFIGS[data.draw(st.sampled_from(["rope", "window", "alibi window"]))]
    mixer = build(config)
    draws = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=4)
    calls = data.draw(draws)
    x = torch.randn(2, sum(taken for taken, _ in calls), C)
    state, used, outputs = mixer.init_state(2), 0, []
    with torch.no_grad():
        for taken, spare in calls:
            state = mixer.reserve(state, taken + spare)
            for t in range(used, used + taken):
                outputs.append(mixer.step(x[:, t : t + 1], state))
            used += taken
        if used:
            assert_close("y", torch.cat(outputs, 1), mixer(x)[0], rtol=1e-5)


def test_a_reserved_cache_has_the_slots_it_needs_and_no_more():
    x = torch.randn(2, 50, C)
    for name, slots in (("rope", 57), ("window", 5), ("window past the end", 57)):
        mixer = build(name)
        with torch.no_grad():
            _, state = mixer(x, mixer.init_state(2), lengths=torch.tensor([50, 20]))
            state = mixer.reserve(state, 7)
        assert state.k.shape == state.v.shape == (2, slots, 4, 8), name


@pytest.mark.parametrize("name", ["rope", "window"])
def test_a_step_beyond_the_reserved_room_is_refused(name):
    mixer, x = build(name), torch.randn(2, 1, C)
    with torch.no_grad():
        state = mixer.reserve(mixer.init_state(2), 3)
        for _ in range(3):
            mixer.step(x, state)
        with pytest.raises(ValueError, match="room for 3 tokens"):
            mixer.step(x, state)
        with pytest.raises(ValueError, match="room for 0 tokens"):
            mixer.step(x, mixer.init_state(2))


@some
@given(st.data())
def test_rows_may_take_different_numbers_of_tokens_at_every_call(data):
    config = CONFIGS[data.draw(st.sampled_from(["grouped", "window", "alibi window"]))]
    mixer, rows = build(config), 3
    counts = st.lists(st.integers(0, 6), min_size=rows, max_size=rows)
    calls = data.draw(st.lists(counts, min_size=1, max_size=4))
    totals = [sum(call[b] for call in calls) for b in range(rows)]
    tokens = [torch.randn(1, total, C) for total in totals]
    state, used, outputs = mixer.init_state(rows), [0] * rows, [[] for _ in range(rows)]
    with torch.no_grad():
        for call in calls:
            x = 100 * torch.randn(rows, max(call) + 1, C)
            for b, count in enumerate(call):
                x[b, :count] = tokens[b][0, used[b] : used[b] + count]
            y, state = mixer(x, state, lengths=torch.tensor(call))
            for b, count in enumerate(call):
                outputs[b].append(y[b, :count])
                used[b] += count
        assert state.lengths.tolist() == totals
        for b in range(rows):
            whole = mixer(tokens[b])[0]
            assert_close(f"row {b}", torch.cat(outputs[b])[None], whole, rtol=1e-5)


def test_a_window_keeps_no_more_than_it_needs():
    mixer = build("window")
    _, state = mixer(torch.randn(2, 50, C), mixer.init_state(2))
    assert state.k.shape == state.v.shape == (2, 5, 4, 8)
    # Nothing longer is kept alive behind a view.
    assert state.k.untyped_storage().nbytes() == state.k.nbytes


@configs
def test_gradients_reach_every_weight_and_continue_through_the_state(name):
    mixer = build(name)
    x = torch.randn(2, 9, C, requires_grad=True)
    first, state = mixer(x[:, :4], mixer.init_state(2))
    second, _ = mixer(x[:, 4:], state)
    segmented = torch.autograd.grad(
        torch.cat([first, second], 1).square().sum(), [x, *mixer.parameters()]
    )
    whole = torch.autograd.grad(mixer(x)[0].square().sum(), [x, *mixer.parameters()])
    for got, expected in zip(segmented, whole, strict=True):
        assert_close("gradient", got, expected, rtol=1e-5, atol=1e-6)


def test_nope_forgets_order_but_rope_does_not():
    x = torch.randn(1, 6, C)
    swapped = x[:, [1, 0, 2, 3, 4, 5]]
    for name, forgets in (("nope", True), ("rope", False)):
        mixer = build(name)
        with torch.no_grad():
            last, other = mixer(x)[0][:, -1], mixer(swapped)[0][:, -1]
        assert torch.allclose(last, other, atol=1e-5) == forgets


def test_casting_to_bfloat16_keeps_angles_and_slopes_exact():
    for name in ("rope", "alibi"):
        mixer, low = build(name), build(name).bfloat16()
        rounded = build(name)
        rounded.load_state_dict({k: v.float() for k, v in low.state_dict().items()})
        x = torch.randn(1, 400, C).bfloat16()
        with torch.no_grad():
            y, expected = low(x)[0], rounded(x.float())[0]
        assert y.dtype == torch.bfloat16
        assert_close(name, y.float(), expected, rtol=2e-2)
        assert not list(mixer.buffers())


def test_autocast_decodes_with_a_cache_of_the_activations():
    mixer = build("grouped")
    x = torch.randn(2, 6, C)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        full, _ = mixer(x)
        y, state = mixer(x[:, :3], mixer.init_state(2))
        z, state = mixer(x[:, 3:], state)
        state = mixer.reserve(mixer(x[:, :3], mixer.init_state(2))[1], 3)
        steps = [mixer.step(x[:, t : t + 1], state) for t in range(3, 6)]
    assert state.k.dtype == torch.bfloat16
    assert_close("segments", torch.cat([y, z], 1), full, rtol=2e-2)
    assert_close("steps", torch.cat([y, *steps], 1), full, rtol=2e-2)


@pytest.mark.parametrize("wide_first", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_autocast_may_begin_or_end_between_prompt_and_steps(rows, wide_first):
    mixer = build("grouped")
    x = torch.randn(rows, 6, C)
    with torch.no_grad():
        full, _ = mixer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=not wide_first):
            _, state = mixer(x[:, :3], mixer.init_state(rows))
        state = mixer.reserve(state, 3)
        with torch.autocast("cpu", torch.bfloat16, enabled=wide_first):
            steps = [mixer.step(x[:, t : t + 1], state) for t in range(3, 6)]
    assert_close("steps", torch.cat(steps, 1).float(), full[:, 3:], rtol=2e-2)


def test_float64_is_exact_in_every_way_to_run():
    mixer = build("rope").double()
    x = torch.randn(2, 300, C, dtype=torch.float64)
    with torch.no_grad():
        full, _ = mixer(x)
        q, k, v = mixer._project(x)
        steps = 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4)
        angles = torch.arange(300)[:, None] * steps
        q, k = (apply_rope(part, angles.cos(), angles.sin()) for part in (q, k))
        assert_close("forward", full, mixer.wo(attention(q, k, v).out.flatten(2)), rtol=1e-13)
        state = mixer.reserve(mixer(x[:, :-1], mixer.init_state(2))[1], 1)
        assert_close("step", mixer.step(x[:, -1:], state), full[:, -1:], rtol=1e-13)
        mixer = AttentionConfig(head_dim=4, rope_base=None, alibi="olmo").build(3 * 4).double()
        slopes = 2 ** (-8 * torch.arange(1, 4, dtype=torch.float64) / 3)
        out = attention(*mixer._project(x[..., :12]), alibi_slopes=slopes).out
        assert_close("alibi", mixer(x[..., :12])[0], mixer.wo(out.flatten(2)), rtol=1e-13)


def test_inductor_compiles_an_odd_length_right():
    # Over 5 s: it compiles C++, where torch.compile has gone wrong before.
    torch._dynamo.reset()
    mixer = build(dataclasses.replace(CONFIGS["window"], num_kv_heads=2))
    x, dy = torch.randn(2, 2, 19, C)
    inputs = {"x": x.requires_grad_(), **dict(mixer.named_parameters())}
    y, expected = mixer(x)[0], torch.compile(mixer, fullgraph=True)(x)[0]
    assert_close("y", y, expected, rtol=1e-5)
    found, right = (torch.autograd.grad(z, list(inputs.values()), dy) for z in (y, expected))
    for name, got, ref in zip(inputs, found, right, strict=True):
        assert_close(f"d{name}", got, ref, rtol=1e-5)


def test_queries_and_keys_are_normed_over_all_heads_and_values_are_not():
    mixer, x = build(dataclasses.replace(CONFIGS["normed"], rope_base=None)), torch.randn(2, 9, C)

    def rms(x, norm):
        return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * norm.weight

    q, k, v = rms(mixer.wq(x), mixer.q_norm), rms(mixer.wk(x), mixer.k_norm), mixer.wv(x)
    expected = mixer.wo(
        attention(*(part.unflatten(-1, (-1, 8)) for part in (q, k, v))).out.flatten(2)
    )
    assert_close("y", mixer(x)[0], expected, rtol=1e-5)


def test_flops_count_weights_and_visible_keys():
    T = 50
    for name, config in CONFIGS.items():
        mixer = build(name)
        W = config.window_size or T
        keys = sum(min(t + 1, W) for t in range(T)) / T
        weights = sum(w.weight.numel() for w in (mixer.wq, mixer.wk, mixer.wv, mixer.wo))
        width = 8 * (config.num_heads or 4)
        assert mixer.flops_per_token(T) == pytest.approx(2 * weights + 4 * width * keys), name


@pytest.mark.parametrize("name", ["rope", "window", "alibi"])
def test_training_compiles_into_one_graph(name):
    mixer, x = build(name), torch.randn(2, 12, C)
    compiled = torch.compile(mixer, fullgraph=True, backend="aot_eager")
    y, _ = compiled(x)
    assert_close("y", y, mixer(x)[0], rtol=1e-5)
    y.sum().backward()
    assert mixer.wq.weight.grad.isfinite().all()


def test_one_graph_serves_segments_of_every_length():
    torch._dynamo.reset()
    mixer, x = build("window").eval(), torch.randn(2, 41, C)
    compiled = torch.compile(mixer, fullgraph=True, dynamic=True, backend="eager")
    state, found = mixer.init_state(2), []
    with torch.no_grad():
        for part in x.split([9, 5, 27], dim=1):
            y, state = compiled(part, state)
            found.append(y)
        assert_close("y", torch.cat(found, 1), mixer(x)[0], rtol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 5}, "head_dim must divide d_model, got 5 and 32: or set num_heads"),
        ({"num_heads": 0}, "num_heads must be 1 or more, got 0"),
        ({"num_heads": 6, "num_kv_heads": 4}, "num_kv_heads must divide the 6 query heads, got 4"),
        ({"rope_base": None, "rope_scaling": RopeScaling(2.0)}, "rope_scaling needs a rope_base"),
        ({"num_kv_heads": 3}, "num_kv_heads must divide the 4 query heads, got 3"),
        ({"window_size": 0}, "window_size must be 1 or more, got 0"),
        ({"head_dim": 0}, "head_dim must be 1 or more, got 0"),
        ({"num_kv_heads": 0}, "num_kv_heads must be 1 or more, got 0"),
        ({"rope_base": 0.0}, "rope_base must be positive and finite, got 0.0"),
        ({"rope_base": float("nan")}, "rope_base must be positive and finite, got nan"),
        ({"alibi": "press"}, "set rope_base=None"),
        ({"head_dim": 1}, "head_dim must be even for RoPE"),
        ({"alibi": "bloom", "rope_base": None}, "'press', 'olmo'"),
        ({"norm_eps": 0.0}, "norm_eps must be positive and finite, got 0.0"),
    ],
)
def test_bad_configurations_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        build(dataclasses.replace(CONFIGS["rope"], **changes))


def test_bad_calls_are_named():
    mixer = build("rope")
    x = torch.randn(2, 3, C)
    with pytest.raises(ValueError, match=r"x must be \(B, T, 32\)"):
        mixer(x[..., :8])
    with pytest.raises(ValueError, match=r"state.k must be \(2, any, 4, 8\)"):
        mixer(x, mixer.init_state(3))
    with pytest.raises(ValueError, match="lengths needs a state"):
        mixer(x, lengths=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="cu_seqlens packs"):
        mixer(x, cu_seqlens=torch.tensor([0, 3]))


@pytest.mark.parametrize(
    ("name", "cut"),
    [
        ("rope", lambda k, n: (k[:, 1:], n)),
        ("window", lambda k, n: (k[:, 1:], n)),
        ("rope", lambda k, n: (k[:, :0], n)),
        ("window", lambda k, n: (torch.cat([k, k], 1), n)),
        ("rope", lambda k, n: (k, n + torch.tensor([0, 1]))),
        ("window", lambda k, n: (k, n - torch.tensor([0, 99]))),
    ],
)
@torch.no_grad()
def test_a_state_that_does_not_hold_its_tokens_is_refused(name, cut):
    mixer, x = build(name), torch.randn(2, 6, C)
    _, state = mixer(x, mixer.init_state(2))
    (k, lengths), (v, _) = (cut(part, state.lengths) for part in state[:2])
    for call in (mixer, mixer.step, lambda x, cache: mixer.reserve(cache, 1)):
        with pytest.raises(
            ValueError, match=r"state\.(k|lengths) must (have at most|be from 0|be 0 or)"
        ):
            call(x[:, :1], type(state)(k, v, lengths))


@torch.no_grad()
def test_shapes_of_a_continued_state_can_be_had_from_fake_tensors():
    with FakeTensorMode():
        mixer, x = CONFIGS["window"].build(C), torch.randn(2, 6, C)
        _, state = mixer(x, mixer(x, mixer.init_state(2))[1])
        assert mixer.step(x[:, :1], state).shape == (2, 1, C)


@torch.no_grad()
def test_rows_may_be_mapped_with_their_states():
    mixer, x = build("window"), torch.randn(3, 1, 6, C)
    states = [mixer(row, mixer.init_state(1))[1] for row in x]
    together = type(states[0])(*map(torch.stack, zip(*states, strict=True)))
    found = torch.vmap(lambda row, state: mixer(row, state)[0])(x, together)
    alone = [mixer(row, state)[0] for row, state in zip(x, states, strict=True)]
    assert_close("y", found, torch.stack(alone), rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("D", [16, 32])  # by the references, and by the kernels
@pytest.mark.parametrize("name", ["rope", "window", "alibi"])
def test_cuda_mixer_keeps_every_law(name, D):
    mixer = build(dataclasses.replace(CONFIGS[name], head_dim=D, num_kv_heads=1)).cuda()
    check_segments(mixer, num_tokens=200, splits=[130, 69, 1], rtol=2e-5)
    check_packed(mixer, [0, 150, 1, 49], rtol=2e-5)
    check_ragged(mixer, [150, 3, 0], steps=3, rtol=2e-5)
    check_step(mixer, [150, 3, 0], steps=7, rtol=2e-5)


@pytest.mark.gpu
@configs
def test_a_cuda_step_never_waits_for_the_gpu(name):
    mixer, x = build(name).cuda(), torch.randn(2, 1, C, device="cuda")
    with torch.no_grad():
        state = mixer.reserve(mixer.init_state(2), 20)
        mixer.step(x, state)
        torch.cuda.set_sync_debug_mode("error")
        try:
            mixer.step(x, state)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["rope", "window", "alibi", "layer norms"])
@pytest.mark.parametrize("packed", [False, True])
def test_cuda_mixer_compiles_into_one_graph(name, packed):
    torch._dynamo.reset()
    mixer = build(dataclasses.replace(CONFIGS[name], head_dim=16)).cuda()
    x = torch.randn(1, 300, C, device="cuda")
    options = {"cu_seqlens": torch.tensor([0, 140, 300, 300]).cuda()} if packed else {}
    with torch.autocast("cuda", torch.bfloat16):
        y, _ = torch.compile(mixer, fullgraph=True)(x, **options)
        expected, _ = mixer(x, **options)
    assert_close("y", y, expected, rtol=1e-2)
    y.float().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters())
