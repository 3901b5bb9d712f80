"""The gated scan: its definition, Triton against it, states, packing, padding, limits."""

from importlib.util import find_spec
from itertools import accumulate, pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from mezzo_core.testing import assert_close, grads
from mezzo_rat.ops.gated_scan import gated_scan
from torch._subclasses import FakeTensorMode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IMPLS = ["reference", "triton"]
FLOAT8 = torch.float8_e4m3fn
# Name: (B, T, lengths of packed sequences, real tokens of each row).
# Above 32 tokens time is split; see `_spans_are_short`.
CASES = {
    "one token": (3, 1, None, None),
    "no token": (2, 0, None, None),
    "63 tokens": (2, 63, None, None),
    "spans": (1, 72, None, None),
    "packed": (1, 24, (0, 1, 15, 0, 1, 7, 0), None),
    "packed, spans": (1, 76, (0, 25, 1, 0, 11, 37, 2, 0), None),
    "padded": (3, 20, None, (20, 0, 7)),
    "padded, spans": (2, 60, None, (20, 59)),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


@pytest.fixture(autouse=True)
def _triton_is_installed(request):
    if "triton" in request.node.name:
        pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def _spans_are_short(request, monkeypatch):
    """Split time into spans of 32 tokens, not 128, which the interpreter would walk slowly."""
    if find_spec("triton") and not request.node.get_closest_marker("gpu"):
        from mezzo_rat.ops.gated_scan.triton import spans

        monkeypatch.setattr(spans, "SHORTEST", 32)


def problem(case, C=3, *, dtype=torch.float32, device=DEVICE, seed=0, bias=True, state=True):
    """Random inputs of a case, its keyword arguments, and gradients of the two outputs."""
    B, T, packed, real = case
    draw = torch.Generator(device).manual_seed(seed)
    high = torch.float64 if dtype == torch.float64 else torch.float32

    def normal(*shape):
        return torch.randn(shape, generator=draw, device=device, dtype=high)

    num_states = B if packed is None else len(packed)
    inputs = {
        "zvg": normal(B, T, 3 * C).to(dtype),
        "gate_bias": normal(C) + 1 if bias else None,
        "initial_state": normal(num_states, C) if state else None,
    }
    options = {
        "cu_seqlens": packed and torch.tensor([0, *accumulate(packed)], device=device),
        "lengths": real and torch.tensor(real, device=device),
    }
    return inputs, options, (normal(B, T, C).to(dtype), normal(num_states, C))


def scan(impl, **options):
    return lambda zvg, gate_bias=None, initial_state=None: tuple(
        gated_scan(zvg, gate_bias=gate_bias, initial_state=initial_state, impl=impl, **options)
    )


def recurrence(zvg, gate_bias, initial_state, real):
    """Run the definition on one row, token by token."""
    z, v, g = zvg.chunk(3, -1)
    h, outs = initial_state, []
    for t in range(zvg.shape[0]):
        if t < real:
            # Not sigmoid, whose derivative torch computes as f (1 - f): 1 - f has no digits at 50.
            keep, write = (F.logsigmoid(x).exp() for x in (g[t] + gate_bias, -g[t] - gate_bias))
            h = keep * h + write * v[t]
        outs.append(z[t].sigmoid() * h if t < real else torch.zeros_like(h))
    return torch.stack(outs) if outs else z[:0], h


def definition(cu_seqlens=None, lengths=None):
    def run(zvg, gate_bias, initial_state):
        if cu_seqlens is None:
            real = [zvg.shape[1]] * len(zvg) if lengths is None else lengths.tolist()
            rows = [recurrence(zvg[i], gate_bias, initial_state[i], n) for i, n in enumerate(real)]
            return tuple(torch.stack(part) for part in zip(*rows, strict=True))
        rows = [
            recurrence(zvg[0, start:end], gate_bias, initial_state[i], end - start)
            for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist()))
        ]
        outs, finals = zip(*rows, strict=True)
        return torch.cat(outs)[None], torch.stack(finals)

    return run


def on_cpu(pair):
    return tuple(x.cpu() for x in pair[0]), {name: g.cpu() for name, g in pair[1].items()}


def flat(pair):
    (out, final_state), gradients = pair
    return {"out": out, "final_state": final_state} | {f"d{k}": g for k, g in gradients.items()}


def assert_same(got, expected, *, rtol, low=None):
    """Compare outputs and gradients; the parts z, v and g of the one gradient apart."""
    found, wanted, lows = (split(flat(pair)) for pair in (got, expected, low or expected))
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        gate = low is not None and name in ("dg", "dgate_bias")
        # float32 results of low inputs come from sums that no rounding to the low dtype enters.
        narrow = low is not None and value.dtype != torch.float32
        assert_close(
            name,
            value,
            wanted[name],
            rtol=8e-3 if gate else rtol if narrow or low is None else 1e-5,
            low=lows[name] if narrow else None,
            factor=3.0 if name.startswith("d") else 2.0,
        )


def split(results):
    dzvg = results.pop("dzvg", None)
    parts = {} if dzvg is None else dict(zip(("dz", "dv", "dg"), dzvg.chunk(3, -1), strict=True))
    return results | parts


@cases
def test_reference_is_the_definition_with_all_its_gradients(case):
    inputs, options, dout = problem(case, dtype=torch.float64, device="cpu")
    expected = grads(definition(**options), inputs, dout)
    assert_same(grads(scan("reference", **options), inputs, dout), expected, rtol=1e-12)


@pytest.mark.parametrize("name", ["one token", "packed", "padded"])
def test_gradcheck(name):
    inputs, options, _ = problem(CASES[name], 2, dtype=torch.float64, device="cpu")
    leaves = [x.requires_grad_() for x in inputs.values()]
    assert torch.autograd.gradcheck(scan("reference", **options), leaves)


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_triton_equals_the_reference(case, dtype):
    check_triton(case, 3, dtype)


def check_triton(case, C, dtype, **kwargs):
    inputs, options, dout = problem(case, C, dtype=dtype, **kwargs)
    exact = {k: v if v is None else v.float() for k, v in inputs.items()}
    expected = grads(scan("reference", **options), exact, tuple(d.float() for d in dout))
    got = grads(scan("triton", **options), inputs, dout)
    assert got[0][0].dtype == got[1]["zvg"].dtype == dtype
    if dtype == torch.float32:
        return assert_same(got, expected, rtol=1e-5)
    low = grads(scan("reference", **options), inputs, dout)
    return assert_same(got, expected, rtol=5e-3, low=low)


@settings(max_examples=settings().max_examples // 8)
@given(
    st.integers(1, 2),
    st.sampled_from([1, 7, 8, 9, 16, 17, 63, 100]),
    st.sampled_from([1, 2, 12]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 1000),
)
@example(1, 33, 65, True, True, 0)  # one past a span; more channels than a program has
def test_triton_equals_the_reference_at_any_shape(B, T, C, bias, state, seed):
    pytest.importorskip("triton")
    check_triton((B, T, None, None), C, torch.float32, seed=seed, bias=bias, state=state)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("pulled", [0, 1])
def test_each_output_can_be_pulled_alone(impl, pulled):
    inputs, options, dout = problem(CASES["63 tokens"])
    only = tuple(d if i == pulled else None for i, d in enumerate(dout))
    zeroed = tuple(d * (i == pulled) for i, d in enumerate(dout))
    expected = grads(scan("reference", **options), inputs, zeroed)
    assert_same(grads(scan(impl, **options), inputs, only), expected, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["zvg", "gate_bias", "initial_state"])
def test_each_gradient_can_be_wanted_alone(impl, name):
    inputs, options, pull = problem((2, 20, None, None))
    _, expected = grads(scan(impl, **options), inputs, pull)
    rest = {n: x for n, x in inputs.items() if n != name}
    alone = lambda **x: scan(impl, **options)(**rest, **x)  # noqa: E731
    _, found = grads(alone, {name: inputs[name]}, pull)
    assert torch.equal(found[name], expected[name])


@pytest.mark.parametrize("impl", IMPLS)
def test_no_gradients_give_the_same_results(impl):
    inputs, options, _ = problem(CASES["spans"])
    tracked = scan(impl, **options)(**{k: v.requires_grad_() for k, v in inputs.items()})
    with torch.no_grad():
        untracked = scan(impl, **options)(**inputs)
    for one, other in zip(tracked, untracked, strict=True):
        assert one.requires_grad
        assert not other.requires_grad
        assert torch.equal(one, other)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["packed", "packed, spans"])
def test_a_packed_sequence_equals_itself_alone(name, impl):
    inputs, options, _ = problem(CASES[name])
    options["cu_seqlens"] = options["cu_seqlens"].int()
    out, final_state = scan(impl, **options)(**inputs)
    for i, (start, end) in enumerate(pairwise(options["cu_seqlens"].tolist())):
        alone, last = scan(impl)(
            inputs["zvg"][:, start:end], inputs["gate_bias"], inputs["initial_state"][i : i + 1]
        )
        assert_close("out", out[:, start:end], alone, rtol=1e-5)
        assert_close("final_state", final_state[i : i + 1], last, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_packed_sequence_that_broke_breaks_no_other(impl):
    inputs, options, dout = problem(CASES["packed, spans"])
    inputs["zvg"][0, 12] = float("nan")
    (out, final_state), found = grads(scan(impl, **options), inputs, dout)
    assert out[0, 12:25].isnan().all()
    assert final_state[1].isnan().all()
    assert out[0, :12].isfinite().all()
    assert out[0, 25:].isfinite().all()
    assert final_state[2:].isfinite().all()
    assert found["zvg"][0, 25:].isfinite().all()
    assert found["initial_state"][2:].isfinite().all()


@pytest.mark.parametrize("impl", IMPLS)
def test_padding_has_no_influence(impl):
    inputs, options, dout = problem(CASES["padded, spans"])
    expected = grads(scan(impl, **options), inputs, dout)
    for row, length in enumerate(CASES["padded, spans"][3]):
        alone, last = scan(impl)(
            inputs["zvg"][row : row + 1, :length],
            inputs["gate_bias"],
            inputs["initial_state"][row : row + 1],
        )
        assert_close("out", expected[0][0][row : row + 1, :length], alone, rtol=1e-5)
        assert_close("final_state", expected[0][1][row : row + 1], last, rtol=1e-5)
        inputs["zvg"][row, length:] = float("nan")
    assert_same(grads(scan(impl, **options), inputs, dout), expected, rtol=0)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("splits", [[3, 0, 5, 1, 5], [37, 13, 35]])
def test_segments_with_their_states_equal_the_whole(splits, impl):
    inputs, _, _ = problem((2, sum(splits), None, None))
    whole = scan(impl)(**inputs)
    state, outs = inputs["initial_state"], []
    for part in inputs["zvg"].split(splits, 1):
        out, state = scan(impl)(part, inputs["gate_bias"], state)
        outs.append(out)
    assert_close("out", torch.cat(outs, 1), whole[0], rtol=1e-6)
    assert_close("final_state", state, whole[1], rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("at", [5, 50])
def test_the_future_and_other_rows_change_nothing(at, impl):
    inputs, _, _ = problem((2, 72, None, None))
    out, _ = scan(impl)(**inputs)
    changed = dict(inputs, zvg=inputs["zvg"].clone())
    changed["zvg"][0, at:] = -7.0
    again, _ = scan(impl)(**changed)
    assert torch.equal(again[0, :at], out[0, :at])
    assert not torch.equal(again[0, at:], out[0, at:])
    assert torch.equal(again[1], out[1])
    rows = {k: v if k == "gate_bias" else v[1:] for k, v in inputs.items()}
    assert_close("alone", scan(impl)(**rows)[0][0], out[1], rtol=1e-6)


@pytest.mark.parametrize("logit", [-50.0, -1e-4, 50.0])
def test_triton_is_exact_at_extreme_gates(logit):
    inputs, options, dout = problem((1, 100, None, None), dtype=torch.float64, device="cpu")
    inputs["zvg"][..., 6:], inputs["gate_bias"] = logit, torch.zeros(3, dtype=torch.float64)
    expected = grads(definition(**options), inputs, dout)
    single = {k: v.to(DEVICE, torch.float32) for k, v in inputs.items()}
    pull = tuple(d.to(DEVICE, torch.float32) for d in dout)
    assert_same(on_cpu(grads(scan("triton", **options), single, pull)), expected, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("place", ["logits", "bias"])
def test_infinite_logits_keep_everything_or_nothing(place, impl):
    inputs, _, dout = problem((1, 70, None, None))
    z, v, _ = inputs["zvg"].chunk(3, -1)
    for logit in (float("inf"), float("-inf")):
        if place == "logits":
            inputs["zvg"][..., 6:] = logit
        else:
            inputs["gate_bias"].fill_(logit)
        (out, final_state), found = grads(scan(impl), inputs, dout)
        h = inputs["initial_state"][:, None] if logit > 0 else v
        assert_close("out", out, z.sigmoid() * h, rtol=1e-6)
        assert torch.equal(final_state, h[:, -1])
        assert all(g.isfinite().all() for g in found.values())
        assert not found["zvg"][..., 6:].any()


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("part", [0, 1, 2])
def test_a_nan_stays_one(part, impl):
    inputs, _, _ = problem((1, 70, None, None))
    inputs["zvg"][0, 40, part * 3] = float("nan")
    out, final_state = scan(impl)(**inputs)
    assert out[0, 40, 0].isnan()
    assert final_state[0, 0].isnan() == (part > 0)
    assert out[0, :40].isfinite().all()
    assert out[..., 1:].isfinite().all()


@pytest.mark.parametrize("impl", ["reference", pytest.param("triton", marks=pytest.mark.gpu)])
def test_long_memories_survive_65_537_tokens(impl):
    inputs, options, dout = problem((1, 65_537, None, None), 2)
    inputs["gate_bias"] += 5
    exact = {k: v.cpu().double() for k, v in inputs.items()}
    pull = tuple(d.cpu().double() for d in dout)
    expected = grads(scan("reference", **options), exact, pull)
    assert_same(on_cpu(grads(scan(impl, **options), inputs, dout)), expected, rtol=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_strides_do_not_matter(impl):
    inputs, options, (dout, dfinal) = problem((2, 21, None, None), 4)
    expected = grads(scan(impl, **options), inputs, (dout, dfinal))
    views = {
        "channels first": inputs["zvg"].transpose(1, 2).contiguous().transpose(1, 2),
        "wide rows": torch.cat([inputs["zvg"], inputs["zvg"]], -1)[..., 12:],
        "time first": inputs["zvg"].transpose(0, 1).contiguous().transpose(0, 1),
    }
    pull = dout.transpose(0, 1).contiguous().transpose(0, 1), dfinal.t().contiguous().t()
    for name, zvg in views.items():
        assert not zvg.is_contiguous(), name
        state = inputs["initial_state"].t().contiguous().t()
        strided = inputs | {"zvg": zvg, "initial_state": state}
        assert_same(grads(scan(impl, **options), strided, pull), expected, rtol=1e-6)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["gate_bias", "initial_state"])
def test_a_bias_or_a_state_of_half_precision_is_taken_as_it_is(name, impl):
    inputs, options, pull = problem((2, 9, None, None))
    low = inputs | {name: inputs[name].bfloat16()}
    found, gradients = grads(scan(impl, **options), low, pull)
    wide, expected = grads(scan(impl, **options), low | {name: low[name].float()}, pull)
    assert all(map(torch.equal, found, wide))
    assert torch.equal(gradients[name], expected[name].bfloat16())


@pytest.mark.parametrize("impl", IMPLS)
def test_lengths_and_a_bias_may_lie_apart(impl):
    inputs, options, pull = problem(CASES["padded"])
    expected = grads(scan(impl, **options), inputs, pull)
    options["lengths"] = torch.stack([options["lengths"], options["lengths"] * 0], 1)[:, 0]
    inputs["gate_bias"] = inputs["gate_bias"].repeat_interleave(2)[::2]
    assert_same(grads(scan(impl, **options), inputs, pull), expected, rtol=1e-6)


@pytest.mark.parametrize(
    "case",
    [(2, 9, None, None), (1, 9, (0, 1, 5, 0, 3, 0), None), (2, 9, None, (9, 4))],
    ids=["plain", "packed", "padded"],
)
def test_opcheck_triton(case):  # each check runs the op many times
    inputs, options, dout = problem(case)
    for value in inputs.values():
        value.requires_grad_()
    args = (*inputs.values(), *options.values(), True)
    torch.library.opcheck(torch.ops.mezzo_rat.gated_scan.default, args)
    bare = [x.detach() for x in inputs.values()]
    *_, kept = torch.ops.mezzo_rat.gated_scan(*bare, *options.values(), True)
    fakes = ("test_schema", "test_faketensor")  # AOTAutograd traces it with the forward
    for dfinal in (dout[1], None):
        pulled = (dout[0], dfinal, *bare, *options.values(), kept)
        op = torch.ops.mezzo_rat.gated_scan_bwd.default
        torch.library.opcheck(op, pulled, test_utils=fakes)


def test_fakes_of_half_precision_triton_have_the_dtypes_of_the_op():
    inputs, options, _ = problem((2, 9, None, None), dtype=torch.float16)
    arguments = [*inputs.values(), *options.values(), True]
    real = torch.ops.mezzo_rat.gated_scan(*arguments)
    with FakeTensorMode(allow_non_fake_inputs=True):
        fake = torch.ops.mezzo_rat.gated_scan(*arguments)
    assert [(x.dtype, x.shape) for x in fake] == [(x.dtype, x.shape) for x in real]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", ["63 tokens", "packed", "padded"])
@pytest.mark.any_shapes
def test_compiles_to_one_graph(name, impl):
    inputs, options, dout = problem(CASES[name])
    expected = grads(scan(impl, **options), inputs, dout)
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(scan(impl, **options), fullgraph=True, backend=backend)
    assert_same(grads(compiled, inputs, dout), expected, rtol=1e-6)


def test_auto_takes_the_reference_for_float64_and_triton_refuses_it():
    inputs, _, _ = problem(CASES["63 tokens"], dtype=torch.float64)
    assert torch.equal(scan("auto")(**inputs)[0], scan("reference")(**inputs)[0])
    with pytest.raises(ValueError, match="does not support float64; supported: float32, bfloat16"):
        scan("triton")(**inputs)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (ValueError, r"zvg must be \(B, T, 3C\), got \(1, 6, 8\)", {"zvg": torch.ones(1, 6, 8)}),
        (ValueError, r"zvg must be \(B, T, 3C\)", {"zvg": torch.ones(6, 9)}),
        (ValueError, "3C at least 1", {"zvg": torch.ones(1, 6, 0)}),
        (TypeError, "zvg must be floating-point", {"zvg": torch.ones(1, 6, 9).long()}),
        (ValueError, r"gate_bias must be \(3,\), got \(9,\)", {"gate_bias": torch.ones(9)}),
        (TypeError, "gate_bias must be floating", {"gate_bias": torch.ones(3).int()}),
        (ValueError, "gate_bias is on meta", {"gate_bias": torch.ones(3, device="meta")}),
        (ValueError, r"initial_state must be \(1, 3\)", {"initial_state": torch.ones(2, 3)}),
        (TypeError, "zvg must be floating-point", {"zvg": torch.ones(1, 6, 9, dtype=FLOAT8)}),
        (TypeError, "initial_state must be floating", {"initial_state": torch.ones(1, 3).bool()}),
        (ValueError, "lengths must be from 0 to T = 6", {"lengths": torch.tensor([7])}),
        (TypeError, "lengths must be int64, got int32", {"lengths": torch.ones(1).int()}),
        (ValueError, r"lengths must be \(1,\)", {"lengths": torch.ones(2).long()}),
        (TypeError, "cu_seqlens must be int32 or int64", {"cu_seqlens": torch.tensor([0.0, 6.0])}),
        (
            ValueError,
            "lengths and cu_seqlens exclude",
            {"lengths": torch.ones(1).long(), "cu_seqlens": torch.tensor([0, 6])},
        ),
        (ValueError, "impl must be one of.*'fast'", {"impl": "fast"}),
    ],
)
@pytest.mark.any_shapes
def test_bad_arguments_are_named(error, message, changes):
    given = {"zvg": torch.ones(1, 6, 9)} | changes
    with pytest.raises(error, match=message):
        gated_scan(given.pop("zvg"), **given)


# A GPU does not look at the borders, which would stop its stream.
@pytest.mark.parametrize("impl", IMPLS if DEVICE == "cpu" else ["reference"])
@pytest.mark.parametrize("borders", [[0, 5], [1, 6], [0, 4, 3, 6], [0, 7, 6]])
def test_bad_borders_are_refused(borders, impl):
    with pytest.raises(ValueError, match="start at 0, never decrease and end at T = 6"):
        gated_scan(torch.ones(1, 6, 3), cu_seqlens=torch.tensor(borders), impl=impl)
    if impl == "triton":  # the registered op, which compiled graphs call without our checks
        with pytest.raises(ValueError, match="gated_scan: cu_seqlens must start at 0"):
            torch.ops.mezzo_rat.gated_scan(
                torch.ones(1, 6, 3), None, None, torch.tensor(borders), None, False
            )


GPU_CASES = {
    "a span a row": (64, 1025, None, None),
    "split": (3, 4097, None, None),
    "padded": (3, 4097, None, (4097, 0, 1000)),
    "packed": (1, 5000, (0, 1, 2500, 0, 1, 2498, 0), None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("C", [32, 100, 2048])
@pytest.mark.parametrize("case", GPU_CASES.values(), ids=GPU_CASES.keys())
def test_triton_on_a_gpu_equals_the_reference(case, C, dtype):
    check_triton(case, C, dtype)


@pytest.mark.gpu
def test_repeats_are_bit_equal():
    inputs, options, dout = problem((2, 5000, None, None), 512, dtype=torch.bfloat16)
    first, second = (flat(grads(scan("triton", **options), inputs, dout)) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.gpu
@pytest.mark.parametrize("T", [262_144, 524_288])
def test_more_than_two_to_the_31_elements(T):
    C, some = 2048, slice(2040, 2048)  # the last channels have the largest offsets
    inputs, _, dout = problem((1, T, None, None), C, dtype=torch.bfloat16)
    got = flat(grads(scan("triton"), inputs, dout))
    z, v, g = (x[..., some] for x in inputs["zvg"].chunk(3, -1))
    few = {
        "zvg": torch.cat([z, v, g], -1).float(),
        "gate_bias": inputs["gate_bias"][some],
        "initial_state": inputs["initial_state"][:, some],
    }
    pull = dout[0][..., some].float(), dout[1][:, some]
    expected = split(flat(grads(scan("reference"), few, pull)))
    for name, value in split(got).items():
        rtol = 8e-3 if name in ("dg", "dgate_bias") else 5e-3
        assert_close(name, value[..., some], expected[name], rtol=rtol)
