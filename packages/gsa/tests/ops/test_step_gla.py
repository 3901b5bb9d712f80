"""One decoding token of gated linear attention, in place: the reference, and the kernels.

The interpreter multiplies bfloat16 wrongly, so that dtype is tested on a GPU only.
"""

import pytest
import torch
from mezzo_core.testing import assert_close
from mezzo_gsa.ops.gla import LayerForm, recurrent_gla, step_gla_, step_gla_layer_

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOW = {torch.float16: 5e-3, torch.bfloat16: 5e-3, torch.float32: 1e-5}
gpu = pytest.mark.gpu
DTYPES = [torch.float32, torch.float16, pytest.param(torch.bfloat16, marks=gpu)]
SIZES = [  # B, HQ, H, K, V
    (1, 2, 2, 32, 32),
    (2, 4, 2, 40, 72),
    (3, 3, 1, 96, 20),
    (2, 1, 1, 1, 3),
    (1, 1, 1, 512, 144),
    pytest.param((1, 4, 4, 256, 512), marks=gpu),
    pytest.param((64, 32, 8, 128, 128), marks=gpu),
    pytest.param((64, 4, 4, 256, 512), marks=gpu),
    pytest.param((2, 2, 1, 512, 1024), marks=gpu),
]
GLA = LayerForm(0.3, damping=16.0)
HGRN2 = LayerForm(feature_map="swish", damping=1.0, lower_bound=0.25)
RETNET = LayerForm(0.3, rope_base=10_000.0)
FORMS = {
    "gla": GLA,
    "gla, t2r": GLA._replace(feature_map="relu"),
    "hgrn2": HGRN2,
    "hgrn2, unbounded": HGRN2._replace(lower_bound=0.0),
    "hgrn2, a bound a channel": HGRN2._replace(lower_bound=0.0),
    "retnet": RETNET,
    "retnet, scaled": RETNET._replace(rope_scaling=(8.0, 1.0, 4.0, 100.0), norm_eps=0.5),
    "retnet, t2r": RETNET._replace(feature_map="relu"),
}


def normal(*shape, seed=0, dtype=torch.float32):
    draws = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=draws).to(DEVICE, dtype)


def draw(sizes, dtype, *, gate="channel"):
    B, HQ, H, K, V = sizes
    return {
        "q": normal(B, HQ, K, seed=1, dtype=dtype),
        "k": normal(B, H, K, seed=2, dtype=dtype),
        "v": normal(B, H, V, seed=3, dtype=dtype),
        "g": normal(B, H, K if gate == "channel" else 1, seed=4).sigmoid().log(),
        "state": normal(B, H, K, V, seed=5),
    }


def draw_layer(name, sizes, dtype):
    """Draw a layer's projections, in its form."""
    B, HQ, H, K, V = sizes
    form = FORMS[name]
    x = draw(sizes, dtype, gate="head" if form.rope_base else "channel")
    gates = x.pop("g")
    x["gates"] = gates if form.damping is None else normal(B, H, K, seed=4, dtype=dtype)
    if form.lower_bound or form.feature_map == "swish":
        x["k"] = None
    over_all = x["k"] is None
    bounds = normal(H * K, seed=8).sigmoid()
    bounds[0] = 0.0
    return {
        **x,
        "form": form,
        "norm_weight": normal(HQ * V if over_all else V, seed=6, dtype=dtype).abs(),
        "z": None if over_all else normal(B, HQ * V, seed=7, dtype=dtype),
        "places": torch.arange(2**24 + 1, 2**24 + 1 + B).to(DEVICE) if form.rope_base else None,
        "log_bounds": torch.stack([bounds.log(), (-bounds).log1p()]) if "a bound" in name else None,
    }


def upcast(inputs):
    return {
        name: x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        for name, x in inputs.items()
    }


def run(op, inputs, impl, **form):
    """Return the output and the state afterwards, of a copy."""
    state = inputs["state"].clone()
    place = state.data_ptr()
    with torch.no_grad():
        out = op(**{**inputs, "state": state}, impl=impl, **form)
    assert state.data_ptr() == place
    return out, state


def check(op, inputs, **form):
    dtype = inputs["q"].dtype
    out, state = run(op, inputs, "triton", **form)
    truth, after = run(op, upcast(inputs), "reference", **form)
    low = None if dtype == torch.float32 else run(op, inputs, "reference", **form)[0]
    assert out.dtype == dtype
    assert_close("out", out, truth, rtol=LOW[dtype], low=low)
    assert_close("state", state, after, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_kernel_equals_the_reference(sizes, gate, dtype):
    check(step_gla_, draw(sizes, dtype, gate=gate), scale=sizes[3] ** -0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FORMS)
def test_the_layers_kernels_equal_the_reference(name, dtype):
    check(step_gla_layer_, draw_layer(name, (2, 4, 2, 40, 72), dtype))


@gpu
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("name", FORMS)
def test_the_layers_kernels_have_every_size(name, sizes):
    if sizes[3] % 2 == 0:
        check(step_gla_layer_, draw_layer(name, sizes, torch.bfloat16))


@pytest.mark.parametrize("gate", [0.0, -1e-7, -0.5, -50.0, float("-inf")])
def test_extreme_gates_keep_their_exact_share(gate):
    inputs = draw((1, 2, 2, 16, 32), torch.float32)
    check(step_gla_, {**inputs, "g": torch.full_like(inputs["g"], gate)})


@pytest.mark.parametrize("name", ["gla", "hgrn2", "hgrn2, unbounded", "hgrn2, a bound a channel"])
@pytest.mark.parametrize("logit", [-100.0, -1.0, 0.0, 1.0, 9.0, 40.0])
def test_extreme_logits_keep_their_digits(name, logit):
    inputs = draw_layer(name, (1, 2, 2, 16, 32), torch.float32)
    inputs["gates"] = torch.full_like(inputs["gates"], logit)
    inputs["state"].zero_()  # shows what is written
    check(step_gla_layer_, inputs)


@pytest.mark.parametrize("gate", ["channel", "head"])
@pytest.mark.parametrize(
    ("impl", "dtype"),
    [("reference", torch.float64), ("reference", torch.float32), ("triton", torch.float32)],
)
def test_steps_equal_the_recurrence(impl, dtype, gate):
    B, T, HQ, H, K, V = 2, 5, 4, 2, 40, 24
    q, k = normal(B, T, HQ, K, seed=1, dtype=dtype), normal(B, T, H, K, seed=2, dtype=dtype)
    v = normal(B, T, H, V, seed=3, dtype=dtype)
    g = normal(B, T, H, K if gate == "channel" else 1, seed=4, dtype=dtype).sigmoid().log()
    expected = recurrent_gla(q, k, v, g, scale=0.2)
    state = torch.zeros(B, H, K, V, dtype=dtype, device=DEVICE)
    outs = [
        step_gla_(q[:, t], k[:, t], v[:, t], g[:, t], state, scale=0.2, impl=impl) for t in range(T)
    ]
    rtol = 1e-10 if dtype == torch.float64 else 1e-5
    assert_close("out", torch.stack(outs, 1), expected.out, rtol=rtol)
    assert_close("state", state, expected.final_state, rtol=rtol)


@pytest.mark.parametrize("impl", ["reference", "triton"])
@pytest.mark.parametrize("name", ["gla", "hgrn2"])
def test_parts_of_a_wider_projection_are_read_in_place(name, impl):
    inputs = draw_layer(name, (3, 2, 2, 16, 32), torch.float32)
    parts = {
        name: inputs[name] for name in ("q", "k", "v", "gates", "z") if inputs[name] is not None
    }
    wide = torch.cat([x.flatten(1) for x in parts.values()] + [normal(3, 5)], dim=1)
    views = wide.split([x[0].numel() for x in parts.values()] + [5], dim=1)
    apart = {
        name: view.unflatten(1, x.shape[1:]) if x.ndim == 3 else view
        for (name, x), view in zip(parts.items(), views, strict=False)
    }
    y, state = run(step_gla_layer_, {**inputs, **apart}, impl)
    expected, after = run(step_gla_layer_, inputs, impl)
    assert torch.equal(y, expected)
    assert torch.equal(state, after)


@pytest.mark.parametrize(
    "places", [torch.tensor([7, 1, 900, 1])[::2], torch.tensor([7]).expand(2)], ids=["2nd", "same"]
)
def test_places_may_have_any_stride(places):
    inputs = {**draw_layer("retnet", (2, 2, 2, 16, 32), torch.float32), "places": places.to(DEVICE)}
    check(step_gla_layer_, inputs)


@pytest.mark.parametrize("turned", [False, True])
def test_heads_channels_and_weights_may_lie_apart(turned):
    inputs = draw_layer("gla", (4, 2, 2, 4, 4), torch.float32)  # as many rows as channels
    laid = {"z": inputs["z"].t().contiguous().t()}
    laid["norm_weight"] = inputs["norm_weight"].repeat_interleave(2)[::2]
    for name in ("q", "k", "v", "gates"):
        x = inputs[name]
        laid[name] = torch.cat([x, -x], -1)[..., :4]
        if turned:
            laid[name] = x.transpose(0, 2).contiguous().transpose(0, 2)
    found, expected = (run(step_gla_layer_, x, "triton") for x in (inputs | laid, inputs))
    assert all(map(torch.equal, found, expected))
    inputs = draw_layer("hgrn2, a bound a channel", (1, 2, 2, 4, 4), torch.float32)
    laid = {"log_bounds": inputs["log_bounds"].t().contiguous().t()}
    found, expected = (run(step_gla_layer_, x, "triton") for x in (inputs | laid, inputs))
    assert all(map(torch.equal, found, expected))


def test_autocast_changes_no_step():
    inputs = draw_layer("gla", (1, 2, 2, 16, 32), torch.float32)
    expected = run(step_gla_layer_, inputs, "reference")
    with torch.autocast(DEVICE, torch.bfloat16):
        found = run(step_gla_layer_, inputs, "reference")
    assert all(map(torch.equal, found, expected))


def test_repeats_are_bit_equal_and_rows_do_not_mix():
    inputs = draw_layer("gla", (3, 4, 2, 40, 72), torch.float32)
    y, _ = run(step_gla_layer_, inputs, "triton")
    assert torch.equal(y, run(step_gla_layer_, inputs, "triton")[0])
    row = {name: inputs[name][1:2] for name in ("q", "k", "v", "gates", "state", "z")}
    alone, _ = run(step_gla_layer_, {**inputs, **row}, "triton")
    assert_close("row 1", y[1:2], alone, rtol=1e-6)


@pytest.mark.parametrize("name", ["q", "k", "v", "gates", "z"])
def test_what_is_not_a_number_shows(name):
    inputs = draw_layer("gla, t2r", (2, 2, 2, 16, 32), torch.float32)
    inputs[name][1].flatten()[-1] = float("nan")  # row 1, head 1
    inputs[name][1, ..., -1] = float("nan")
    y, after = run(step_gla_layer_, inputs, "triton")
    assert y[1].isnan().any()
    assert y[0].isfinite().all()
    assert after[0].isfinite().all()


def test_registered_ops_are_sound():
    sizes = (2, 4, 2, 16, 32)
    plain, ops = draw(sizes, torch.float32), torch.ops.mezzo_gsa
    torch.library.opcheck(ops.gla_step_, (*plain.values(), 0.2))
    for name in ("gla", "hgrn2, a bound a channel", "retnet"):
        x = draw_layer(name, sizes, torch.float32)
        names = ("q", "k", "v", "gates", "state", "norm_weight", "z", "places", "log_bounds")
        torch.library.opcheck(ops.gla_step_layer_, (*[x[name] for name in names], *x["form"]))


@pytest.mark.parametrize("name", ["gla", "hgrn2", "retnet"])
@pytest.mark.any_shapes
def test_a_compiled_step_is_one_graph(name):
    inputs = draw_layer(name, (2, 4, 2, 16, 32), torch.float32)
    compiled = torch.compile(step_gla_layer_, fullgraph=True, backend="aot_eager")
    y, state = run(compiled, inputs, "triton")
    expected, after = run(step_gla_layer_, inputs, "triton")
    assert torch.equal(y, expected)
    assert torch.equal(state, after)


def test_what_needs_gradients_is_refused():
    inputs = draw((1, 2, 2, 16, 32), torch.float32)
    with pytest.raises(RuntimeError, match="step_gla_ overwrites the state"):
        step_gla_(**{**inputs, "v": inputs["v"].requires_grad_()})
    inputs = draw((1, 2, 2, 16, 32), torch.float32)
    with pytest.raises(RuntimeError, match="step_gla_ overwrites the state"):
        step_gla_(**{**inputs, "state": inputs["state"].requires_grad_()})
    for name in ("norm_weight", "log_bounds"):
        layer = draw_layer("hgrn2, a bound a channel", (1, 2, 2, 16, 32), torch.float32)
        layer[name].requires_grad_()
        with pytest.raises(RuntimeError, match="step_gla_layer_ overwrites the state"):
            step_gla_layer_(**layer)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda i: {"q": i["q"][:, None]}, ValueError, r"q must be \(B, HQ, K\)"),
        (lambda i: {"k": i["k"][..., :8]}, ValueError, r"k must be \(1, H, 16\)"),
        (lambda i: {"v": i["v"][:, :1]}, ValueError, r"v must be \(1, 2, V\)"),
        (lambda i: {"v": i["v"].half()}, TypeError, "must have one floating dtype"),
        (lambda i: {"g": i["g"][..., :3]}, ValueError, r"g must be \(1, 2, 16\) or \(1, 2, 1\)"),
        (lambda i: {"g": i["g"].int()}, TypeError, "g must be floating-point"),
        (lambda i: {"state": i["state"].mT}, ValueError, r"state must be \(1, 2, 16, 32\)"),
        (lambda i: {"state": i["state"].double()}, TypeError, r"state must be torch\.float32"),
        (lambda i: {"impl": "fast"}, ValueError, "impl must be one of"),
        (
            lambda i: {"state": i["state"].mT.contiguous().mT},
            ValueError,
            "does not support a state that is not contiguous",
        ),
    ],
)
@pytest.mark.any_shapes
def test_input_that_does_not_fit_is_named(change, error, message):
    inputs = {**draw((1, 2, 2, 16, 32), torch.float32), "impl": "triton"}
    with pytest.raises(error, match=f"step_gla_: .*{message}"):
        step_gla_(**{**inputs, **change(inputs)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_weight": torch.ones(3)}, r"norm_weight must be \(32,\) or \(64,\), got \(3,\)"),
        ({"z": torch.ones(1, 32)}, r"z must be \(1, 64\), got \(1, 32\)"),
        ({"k": None, "gates": torch.ones(1, 2, 1)}, "without k, gates must have the width"),
        ({"places": None}, "places and form.rope_base must be given both or neither"),
        ({"places": torch.ones(1)}, r"places must be int32 or int64, got float32"),
        ({"places": torch.ones(2).long()}, r"places must be \(1,\), got \(2,\)"),
        ({"log_bounds": torch.zeros(2, 16)}, r"log_bounds must be \(2, 32\), got \(2, 16\)"),
    ],
)
@pytest.mark.any_shapes
def test_a_layer_that_does_not_fit_is_named(change, message):
    change = {n: x if x is None else x.to(DEVICE) for n, x in change.items()}
    inputs = draw_layer("retnet", (1, 2, 2, 16, 32), torch.float32)
    with pytest.raises((TypeError, ValueError), match=f"step_gla_layer_: {message}"):
        step_gla_layer_(**{**inputs, **change})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"feature_map": "gelu"}, "feature_map must be None or one of"),
        ({"damping": 0.0}, "damping must be positive and finite, got 0.0"),
        ({"rope_base": -1.0}, "rope_base must be positive and finite, got -1.0"),
        ({"norm_eps": -1.0}, "norm_eps must be positive and finite, got -1.0"),
        ({"lower_bound": 1.0}, r"lower_bound must be in \[0, 1\), got 1.0"),
    ],
)
def test_a_form_that_cannot_be_is_refused(fields, message):
    inputs = draw_layer("retnet", (1, 2, 2, 16, 32), torch.float32)
    with pytest.raises(ValueError, match=f"step_gla_layer_: form.{message}"):
        step_gla_layer_(**{**inputs, "form": RETNET._replace(**fields)})


def test_a_layer_has_one_bound_or_those_of_its_channels():
    inputs = draw_layer("hgrn2, a bound a channel", (1, 2, 2, 16, 32), torch.float32)
    with pytest.raises(ValueError, match=r"with log_bounds, form.lower_bound must be 0, got 0.25"):
        step_gla_layer_(**{**inputs, "form": HGRN2})
    with pytest.raises(ValueError, match=r"log_bounds go with gates \(B, H, K\), got \(1, 2, 1\)"):
        step_gla_layer_(**{**inputs, "k": inputs["q"], "gates": inputs["gates"][..., :1]})


def test_keys_of_an_odd_width_are_not_turned():
    inputs = draw_layer("retnet", (1, 2, 2, 15, 32), torch.float32)
    with pytest.raises(ValueError, match="q must have an even width to be turned"):
        step_gla_layer_(**inputs)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((1, 1, 1, 513, 32), "K = 513"),
        ((1, 1, 1, 16, 1032), "V = 1032"),
        ((0, 1, 1, 16, 32), "empty tensors"),
    ],
)
def test_sizes_without_a_kernel_are_named_and_run_by_the_reference(sizes, message):
    inputs = draw(sizes, torch.float32)
    with pytest.raises(ValueError, match=f'impl="triton" does not support .*{message}'):
        run(step_gla_, inputs, "triton")
    assert torch.equal(run(step_gla_, inputs, "auto")[0], run(step_gla_, inputs, "reference")[0])
