"""One decoding token in place: the reference, and the kernels in the interpreter or on a GPU."""

import pytest
import torch
from mezzo_core.ops.decode_linear import decode_linear
from mezzo_core.testing import assert_close
from mezzo_gsa import GSAConfig
from mezzo_gsa.ops.decoding.triton import tile
from mezzo_gsa.ops.gsa import GSAState, recurrent_gsa, recurrent_gsa_projected
from mezzo_gsa.ops.gsa.arguments import StepForm
from mezzo_gsa.ops.gsa.step import step_gsa_, step_gsa_projected_
from torch.utils._pytree import tree_leaves

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}
gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BETWEEN = ["softmax", "none", "swish", "relu", "relu_squared"]
SIZES = [  # B, HQ, H, M, K, V
    (1, 2, 2, 16, 32, 32),
    (2, 4, 2, 20, 40, 72),
    (3, 3, 1, 64, 96, 32),
    (1, 1, 1, 128, 32, 144),
    pytest.param((1, 4, 4, 64, 512, 512), marks=gpu),
    pytest.param((64, 32, 8, 64, 128, 128), marks=gpu),
]


def normal(*shape, seed=0, dtype=torch.float32):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws).to(DEVICE, dtype)


def draw(sizes, dtype):
    B, HQ, H, M, K, V = sizes
    return {
        "q": normal(B, HQ, K, seed=1, dtype=dtype),
        "k": normal(B, H, K, seed=2, dtype=dtype),
        "v": normal(B, H, V, seed=3, dtype=dtype),
        "g": normal(B, H, M, seed=4).sub(2).sigmoid().log() / 8,
        "s": normal(B, H, M, seed=5).sigmoid(),
        "state": GSAState(normal(B, H, M, K, seed=6), normal(B, H, M, V, seed=7)),
    }


def copy(state):
    return GSAState(*(part.clone() for part in state))


def upcast(inputs):
    return {
        name: x if x is None or isinstance(x, GSAState) else x.float() for name, x in inputs.items()
    }


def run(inputs, impl, **form):
    """Return the output and the state afterwards, of a copy."""
    state = copy(inputs["state"])
    places = [part.data_ptr() for part in state]
    with torch.no_grad():
        out = step_gsa_(**{**inputs, "state": state}, impl=impl, **form)
    assert [part.data_ptr() for part in state] == places
    return out, state


def check(inputs, **form):
    dtype = inputs["q"].dtype
    out, state = run(inputs, "triton", **form)
    truth, after = run(upcast(inputs), "reference", **form)
    low = None if dtype == torch.float32 else run(inputs, "reference", **form)[0]
    assert out.dtype == dtype
    assert_close("out", out, truth, rtol=LOW[dtype], low=low)
    for name in ("k", "v"):
        assert_close(f"state.{name}", getattr(state, name), getattr(after, name), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_equal_the_reference(sizes, dtype):
    check({**draw(sizes, dtype), "s": None}, scale=sizes[4] ** -0.5)


@pytest.mark.parametrize("between", BETWEEN)
def test_kernels_have_every_way_between_the_passes(between):
    check({**draw((2, 4, 2, 20, 40, 72), torch.float32), "s": None}, scale=0.2, between=between)


@pytest.mark.parametrize("missing", [(), ("g",), ("s",)], ids=str)
def test_kernels_take_strengths_and_do_without_gates(missing):
    inputs = draw((2, 4, 2, 20, 40, 72), torch.float32)
    check({**inputs, **dict.fromkeys(missing)}, scale=0.2)


@pytest.mark.parametrize("gate", [0.0, -1e-7, -1e-4, -0.1, -0.5, -50.0])
def test_extreme_gates_write_their_exact_share(gate):
    inputs = draw((1, 2, 2, 16, 32, 32), torch.float32)
    empty = GSAState(*(torch.zeros_like(part) for part in inputs["state"]))
    check({**inputs, "g": torch.full_like(inputs["g"], gate), "s": None, "state": empty})


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_steps_equal_the_recurrence(impl):
    B, T, HQ, H, M, K, V = 2, 5, 4, 2, 20, 40, 24
    q, k, v = normal(B, T, HQ, K, seed=1), normal(B, T, H, K, seed=2), normal(B, T, H, V, seed=3)
    g = normal(B, T, H, M, seed=4).sigmoid().log()
    expected = recurrent_gsa(q, k, v, g, scale=0.2)
    state = GSAState(*(normal(B, H, M, D).zero_() for D in (K, V)))
    outs = [
        step_gsa_(q[:, t], k[:, t], v[:, t], g[:, t], None, state, scale=0.2, impl=impl)
        for t in range(T)
    ]
    assert_close("out", torch.stack(outs, 1), expected.out, rtol=1e-5)
    for name, old, new in zip(("k", "v"), state, expected.final_state, strict=True):
        assert_close(f"state.{name}", old, new, rtol=1e-5)


def draw_projected(sizes, dtype, *, constant=False, norm=True):
    B, HQ, H, M, K, V = sizes
    width = (HQ + H) * K + H * V + (0 if constant else H * M)
    return {
        "x": normal(B, width, seed=1, dtype=dtype),
        "gate_logits": normal(H * M, seed=2) * 4 if constant else None,
        "norm_weight": normal(HQ * V, seed=3).abs() if norm else None,
        "num_heads": HQ,
        "damping": 8.0,
    }


def run_projected(inputs, state, impl, **form):
    state = copy(state)
    with torch.no_grad():
        y = step_gsa_projected_(**inputs, state=state, impl=impl, **form)
    return y, state


def check_projected(sizes, dtype, *, constant=False, norm=True, **form):
    inputs = draw_projected(sizes, dtype, constant=constant, norm=norm)
    state = draw(sizes, dtype)["state"]
    y, after = run_projected(inputs, state, "triton", **form)
    wide = {**inputs, "x": inputs["x"].float()}
    truth, expected = run_projected(wide, state, "reference", **form)
    low = None if dtype == torch.float32 else run_projected(inputs, state, "reference", **form)[0]
    assert y.dtype == dtype
    assert_close("y", y, truth, rtol=LOW[dtype], low=low)
    for name in ("k", "v"):
        assert_close(f"state.{name}", getattr(after, name), getattr(expected, name), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_layer_s_kernels_equal_the_reference(sizes, dtype):
    check_projected(sizes, dtype, scale=0.2)


@pytest.mark.parametrize(
    "form",
    [
        {"constant": True},
        {"norm": False},
        {"swish": False},
        {"norm_eps": 0.5},
        {"between": "relu", "constant": True, "norm": False},
    ],
    ids=str,
)
def test_the_layer_s_kernels_have_every_form(form):
    check_projected((2, 4, 2, 20, 40, 72), torch.float32, **form)


@pytest.mark.parametrize("logit", [-100.0, -1.0, 0.0, 1.0, 9.0, 40.0])
def test_the_layer_s_kernels_keep_the_digits_of_extreme_gates(logit):
    sizes = (1, 2, 2, 16, 32, 32)
    inputs = draw_projected(sizes, torch.float32, norm=False)
    inputs["x"][:, -2 * 16 :] = logit
    empty = GSAState(*(torch.zeros_like(part) for part in draw(sizes, torch.float32)["state"]))
    (y, after), (truth, expected) = (
        run_projected(inputs, empty, impl) for impl in ("triton", "reference")
    )
    assert_close("state.v", after.v, expected.v, rtol=2e-6)
    assert_close("y", y, truth, rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_rows_of_a_wider_matrix_are_read_in_place(impl):
    sizes = (3, 2, 1, 16, 32, 32)
    inputs, state = draw_projected(sizes, torch.float32), draw(sizes, torch.float32)["state"]
    wide = normal(3, inputs["x"].shape[1] + 5)
    wide[:, :-5] = inputs["x"]
    y, _ = run_projected({**inputs, "x": wide[:, :-5]}, state, impl)
    assert torch.equal(y, run_projected(inputs, state, impl)[0])


def draw_tokens(T, sizes, dtype, **options):
    """Draw what `draw_projected` draws, with T tokens of each row."""
    inputs = draw_projected(sizes, dtype, **options)
    return {**inputs, "x": normal(len(inputs["x"]), T, inputs["x"].shape[1], seed=1, dtype=dtype)}


def one_by_one(inputs, state, lengths, impl, **form):
    """Return the outputs of a step for each token, and the state after each row's last one."""
    x, ys, states = inputs["x"], [], [state]
    for t in range(x.shape[1]):
        y, after = run_projected({**inputs, "x": x[:, t]}, states[-1], impl, **form)
        ys.append(y)
        states.append(after)
    rows = torch.arange(len(x), device=x.device)
    last = (torch.stack(part)[lengths, rows] for part in zip(*states, strict=True))
    is_real = torch.arange(x.shape[1], device=x.device) < lengths[:, None]
    return torch.stack(ys, 1) * is_real[..., None], GSAState(*last)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"norm": False}), (torch.float32, {"constant": True})],
    ids=str,
)
def test_several_tokens_are_as_many_steps(impl, dtype, options):
    sizes = (3, 2, 1, 20, 40, 72)
    inputs, state = draw_tokens(5, sizes, dtype, **options), draw(sizes, dtype)["state"]
    lengths = torch.tensor([5, 0, 3], device=DEVICE)
    kept = copy(state)
    with torch.no_grad():
        y, after = recurrent_gsa_projected(**inputs, state=state, lengths=lengths, impl=impl)
        whole, _ = recurrent_gsa_projected(**inputs, state=state, impl=impl)
        certain = torch.tensor([3, 0, 3], device=DEVICE)
        ahead, last = recurrent_gsa_projected(
            **inputs, state=state, lengths=lengths, certain=certain, impl=impl
        )
        _, then = recurrent_gsa_projected(**inputs, state=state, lengths=certain, impl=impl)
        both = torch.stack([lengths, certain, torch.full_like(lengths, -7)], 1)
        apart = dict(zip(("lengths", "certain"), both.unbind(1), strict=False))
        again, same = recurrent_gsa_projected(**inputs, state=state, **apart, impl=impl)
    assert all(map(torch.equal, (again, *same), (ahead, *last)))
    truth, expected = one_by_one(inputs, state, lengths, impl)
    assert_close("y", y, truth, rtol=LOW[dtype])
    assert torch.equal(y[0], whole[0])
    assert torch.equal(ahead, y)
    assert not y[1].any()
    assert torch.equal(after.k[1], state.k[1])
    for name in ("k", "v"):
        assert torch.equal(getattr(state, name), getattr(kept, name))
        assert torch.equal(getattr(last, name), getattr(then, name))
        assert_close(f"state.{name}", getattr(after, name), getattr(expected, name), rtol=1e-5)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_counts_below_zero_that_are_not_checked_stand_for_none(impl, monkeypatch):
    monkeypatch.setattr("mezzo_core.ops.checks.is_read", lambda counts: False)  # as on a GPU
    sizes = (3, 2, 1, 20, 40, 72)
    inputs, state = draw_tokens(2, sizes, torch.float32), draw(sizes, torch.float32)["state"]
    counts = torch.tensor([[2, 2, -1], [1, -2, -1]], device=DEVICE)
    results = [
        recurrent_gsa_projected(**inputs, state=state, lengths=n, certain=m, impl=impl)
        for n, m in (counts, counts.clamp(min=0))
    ]
    for below, none in zip(*map(tree_leaves, results), strict=True):
        assert torch.equal(below, none)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_padding_of_several_tokens_may_be_nan(impl):
    sizes = (2, 4, 2, 20, 40, 72)
    inputs, state = draw_tokens(4, sizes, torch.float32), draw(sizes, torch.float32)["state"]
    lengths = torch.tensor([4, 2], device=DEVICE)
    inputs["x"][1, 2:] = float("nan")
    with torch.no_grad():
        y, after = recurrent_gsa_projected(**inputs, state=state, lengths=lengths, impl=impl)
    assert y.isfinite().all()
    assert all(part.isfinite().all() for part in after)


@gpu
def test_a_layer_reads_a_few_tokens_as_it_does_by_chunks(monkeypatch):
    layer = GSAConfig(num_heads=4, num_slots=16).build(128).to(DEVICE)
    x = normal(2, 16, 128, seed=1)
    lengths, certain = (torch.tensor(n, device=DEVICE) for n in ([9, 16], [9, 5]))
    calls = [
        lambda: layer(x, state),
        lambda: layer(x, state, lengths=lengths),
        lambda: layer.look_ahead(x, state, lengths, certain),
    ]
    with torch.no_grad():
        _, state = layer(normal(2, 40, 128, seed=2), layer.init_state(2))
        found = [call() for call in calls]
        monkeypatch.setattr("mezzo_gsa.gsa.FEW_TOKENS", 0)
        expected = [call() for call in calls]
    for i, ((y, after), (truth, last)) in enumerate(zip(found, expected, strict=True)):
        is_real = torch.arange(16, device=DEVICE) < (lengths[:, None] if i else 16)
        assert_close("y", y * is_real[..., None], truth * is_real[..., None], rtol=1e-4)
        for new, old in zip(after, last, strict=True):
            assert_close("state", new, old, rtol=1e-4)


def test_autocast_changes_no_step():
    sizes = (1, 2, 2, 16, 32, 32)
    inputs, state = draw_projected(sizes, torch.float32), draw(sizes, torch.float32)["state"]
    y, after = run_projected(inputs, state, "reference")
    with torch.autocast(DEVICE, torch.bfloat16):
        found, last = run_projected(inputs, state, "reference")
    assert all(map(torch.equal, (found, *last), (y, *after)))


def test_repeats_are_bit_equal_and_rows_do_not_mix():
    sizes = (3, 4, 2, 20, 40, 72)
    inputs, state = draw_projected(sizes, torch.float32), draw(sizes, torch.float32)["state"]
    y, _ = run_projected(inputs, state, "triton")
    assert torch.equal(y, run_projected(inputs, state, "triton")[0])
    row = GSAState(*(part[1:2] for part in state))
    alone, _ = run_projected({**inputs, "x": inputs["x"][1:2]}, row, "triton")
    assert_close("row 1", y[1:2], alone, rtol=1e-6)


def test_a_gate_that_is_not_a_number_shows():
    sizes = (2, 2, 2, 16, 32, 32)
    inputs, state = (
        draw_projected(sizes, torch.float32, norm=False),
        draw(sizes, torch.float32)["state"],
    )
    inputs["x"][1, -1] = float("nan")  # row 1, head 1, last slot
    y, after = run_projected(inputs, state, "triton")
    assert y[1, 32:].isnan().all()
    assert y[0].isfinite().all()
    assert y[1, :32].isfinite().all()
    assert after.k[1, 1, 15].isnan().all()
    assert after.k[1, 1, :15].isfinite().all()


@pytest.mark.parametrize("num_heads", [1, 4, 64, 4096])
@pytest.mark.parametrize("width", [32, 100, 512])
def test_tiles_fill_a_gpu_and_stay_wide_where_rows_do(num_heads, width):
    size = tile(num_heads, width)
    assert size in (16, 32, 64)
    assert size == 16 or num_heads * -(-width // size) >= 256
    assert size == 64 or num_heads * -(-width // (2 * size)) < 256


def test_registered_ops_are_sound():
    sizes = (2, 4, 2, 16, 32, 32)
    inputs, projected = draw(sizes, torch.float32), draw_projected(sizes, torch.float32)
    ops = torch.ops.mezzo_gsa
    parts = [inputs[name] for name in "qkvg"]
    torch.library.opcheck(ops.gsa_step_, (*parts, None, *inputs["state"], 0.2, "softmax"))
    torch.library.opcheck(
        ops.gsa_step_projected_,
        (
            *(projected[name] for name in ("x", "gate_logits", "norm_weight")),
            *inputs["state"],
            4,
            *StepForm(1.0, "softmax", 8.0, True),
        ),
    )
    tokens = draw_tokens(3, sizes, torch.float32)
    lengths = torch.tensor([3, 1], device=DEVICE)
    torch.library.opcheck(
        ops.gsa_recurrent_projected,
        (
            tokens["x"], lengths, lengths - 1, tokens["gate_logits"], tokens["norm_weight"],
            *inputs["state"], 4, *StepForm(1.0, "softmax", 8.0, True),
        ),
    )  # fmt: skip


@pytest.mark.any_shapes
def test_a_compiled_step_is_one_graph():
    sizes = (2, 4, 2, 16, 32, 32)
    inputs, state = draw_projected(sizes, torch.float32), draw(sizes, torch.float32)["state"]
    ours = copy(state)
    compiled = torch.compile(step_gsa_projected_, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        y = compiled(**inputs, state=ours, impl="triton")
    expected, after = run_projected(inputs, state, "triton")
    assert torch.equal(y, expected)
    assert torch.equal(ours.k, after.k)
    assert torch.equal(ours.v, after.v)


@pytest.mark.parametrize("impl", ["reference", "triton"])
def test_a_norm_that_comes_later_gets_all_digits(impl):
    sizes = (1, 4, 2, 20, 40, 72)
    inputs, state = draw_projected(sizes, torch.float16), draw(sizes, torch.float16)["state"]
    weight, inputs["norm_weight"] = inputs["norm_weight"], None
    rounded, after = run_projected(inputs, state, impl)
    y, again = run_projected(inputs, state, impl, out_dtype=torch.float32)
    assert (rounded.dtype, y.dtype) == (torch.float16, torch.float32)
    assert not torch.equal(y, y.half().float())
    assert torch.equal(y.half(), rounded)
    assert torch.equal(after.k, again.k)
    assert torch.equal(after.v, again.v)
    identity = torch.eye(y.shape[1], dtype=torch.float16, device=DEVICE)
    normed = decode_linear(y, identity, norm_weight=weight, norm_eps=1e-5, impl=impl)
    expected, _ = run_projected({**inputs, "norm_weight": weight}, state, impl)
    assert_close("norm", normed, expected, rtol=1e-3)


def test_the_op_is_sound_with_a_dtype_of_its_own():
    inputs = draw_projected((2, 4, 2, 16, 32, 32), torch.float16, norm=False)
    state = draw((2, 4, 2, 16, 32, 32), torch.float16)["state"]
    form = StepForm(1.0, "softmax", 8.0, True, out_dtype=torch.float32)
    op = torch.ops.mezzo_gsa.gsa_step_projected_
    torch.library.opcheck(op, (inputs["x"], None, None, *state, 4, *form))


def test_what_needs_gradients_is_refused():
    inputs = draw((1, 2, 2, 16, 32, 32), torch.float32)
    with pytest.raises(RuntimeError, match="step_gsa_ overwrites the state"):
        step_gsa_(**{**inputs, "v": inputs["v"].requires_grad_()})
    projected = draw_projected((1, 2, 2, 16, 32, 32), torch.float32)
    projected["norm_weight"].requires_grad_()
    with pytest.raises(RuntimeError, match="step_gsa_projected_ overwrites the state"):
        step_gsa_projected_(**projected, state=inputs["state"])
    constant = draw_projected((1, 2, 2, 16, 32, 32), torch.float32, constant=True)
    constant["gate_logits"].requires_grad_()
    with pytest.raises(RuntimeError, match="step_gsa_projected_ overwrites the state"):
        step_gsa_projected_(**constant, state=inputs["state"])
    projected["x"] = projected["x"][:, None]
    with pytest.raises(RuntimeError, match="recurrent_gsa_projected is for decoding, so it has"):
        recurrent_gsa_projected(**projected, state=inputs["state"])


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda i: {"q": i["q"][:, None]}, ValueError, r"q must be \(B, HQ, K\)"),
        (lambda i: {"k": i["k"][..., :8]}, ValueError, "k must be .1, H, 32., H at"),
        (lambda i: {"v": i["v"].half()}, TypeError, "must have one floating dtype"),
        (lambda i: {"g": None, "s": None}, ValueError, "g or s must be given"),
        (lambda i: {"g": i["g"][:, :1]}, ValueError, r"g must be .*, got"),
        (lambda i: {"between": "max"}, ValueError, "between must be one of"),
        (lambda i: {"state": GSAState(i["state"].v, i["state"].v)}, ValueError, r"state\.k must"),
        (
            lambda i: {"state": GSAState(i["state"].k, i["state"].v.double())},
            TypeError,
            r"state\.v must be torch\.float32, got torch\.float64",
        ),
        (lambda i: {"impl": "fast"}, ValueError, "impl must be one of"),
        (
            lambda i: {"state": GSAState(i["state"].k.mT.contiguous().mT, i["state"].v)},
            ValueError,
            "does not support a state that is not contiguous",
        ),
    ],
)
@pytest.mark.any_shapes
def test_input_that_does_not_fit_is_named(change, error, message):
    inputs = {**draw((1, 2, 2, 16, 32, 40), torch.float32), "impl": "triton"}
    with pytest.raises(error, match=message):
        step_gsa_(**{**inputs, **change(inputs)})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"num_heads": 3}, ValueError, "num_heads must be a multiple of the state's 2, got 3"),
        ({"num_heads": 4}, ValueError, r"x must be \(B, 304\) for this state"),
        ({"x": torch.zeros(1, 240, dtype=torch.int32)}, TypeError, "x must be floating-point"),
        ({"gate_logits": torch.zeros(32)}, ValueError, r"x must be \(B, 208\)"),
        ({"norm_weight": torch.zeros(3)}, ValueError, r"norm_weight must be \(80,\)"),
        ({"between": "max"}, ValueError, "between must be one of"),
        ({"out_dtype": torch.int64}, TypeError, "out_dtype must be a floating-point dtype"),
        ({"out_dtype": "float32"}, TypeError, "out_dtype must be a floating-point dtype"),
        ({"damping": -1.0}, ValueError, "damping must be positive and finite, got -1"),
        ({"x": torch.zeros(2, 240)}, ValueError, r"state\.k must be \(2, 2, 16, 32\)"),
    ],
)
@pytest.mark.any_shapes
def test_a_projection_that_does_not_fit_is_named(change, error, message):
    sizes = (1, 2, 2, 16, 32, 40)
    state = draw(sizes, torch.float32)["state"]
    change = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    with pytest.raises(error, match=message):
        step_gsa_projected_(**{**draw_projected(sizes, torch.float32), **change}, state=state)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"x": torch.zeros(1, 240)}, ValueError, r"x must be \(B, T, W\) with T at least 1"),
        ({"x": torch.zeros(1, 0, 240)}, ValueError, r"got \(1, 0, 240\)"),
        ({"lengths": torch.tensor([4])}, ValueError, "lengths"),
        ({"certain": torch.tensor([1.0])}, TypeError, "certain must be int64"),
        ({"num_heads": 4}, ValueError, "recurrent_gsa_projected: x must be"),
    ],
)
@pytest.mark.any_shapes
def test_tokens_that_do_not_fit_are_named(change, error, message):
    sizes = (1, 2, 2, 16, 32, 40)
    state = draw(sizes, torch.float32)["state"]
    change = {n: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for n, x in change.items()}
    with pytest.raises(error, match=message):
        recurrent_gsa_projected(**{**draw_tokens(3, sizes, torch.float32), **change}, state=state)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [((1, 1, 1, 129, 32, 32), "M = 129"), ((1, 1, 1, 16, 32, 520), "V = 520")],
)
def test_sizes_without_a_kernel_are_named_and_run_by_the_reference(sizes, message):
    inputs = {**draw(sizes, torch.float32), "s": None}
    with pytest.raises(ValueError, match=f'impl="triton" does not support .*{message}'):
        run(inputs, "triton")
    assert torch.equal(run(inputs, "auto")[0], run(inputs, "reference")[0])
